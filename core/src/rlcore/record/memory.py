"""How much memory the whole process tree of a run holds."""

from __future__ import annotations

import os
import threading
from types import TracebackType

__all__ = ["PeakMemory"]


class PeakMemory:
    """Samples the resident memory of this process and its descendants while it is entered.

    Shared pages count once per process, so the figure is an upper bound. A child that is about to become another
    program still shares the whole memory of its parent; it does not count.
    """

    def __init__(self, every: float = 0.5) -> None:
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak_gib = 0.0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def current_gib(self) -> float:
        """Resident GiB (2^30 bytes) of the tree now."""
        import psutil

        me = psutil.Process(os.getpid())
        mine = me.memory_info()
        total = mine.rss
        for process in me.children(recursive=True):
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                continue
            if memory.vms != mine.vms:
                total += memory.rss
        gib = float(total) / 2**30
        self.peak_gib = max(self.peak_gib, gib)
        return gib

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self.current_gib()
