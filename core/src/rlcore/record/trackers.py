"""Sends metrics to trackers; a tracker that fails or hangs never harms the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from rlcore.protocols import Tracker
from rlcore.types import RunContext

__all__ = ["Trackers"]

FINISH_SECONDS = 10.0
"""Bound of waiting for trackers at the end of a run."""


class Trackers:
    """Calls each tracker in a thread of its own, in order.

    A tracker that raises is switched off with one alarm; one that hangs delays the end of the run by at most ten seconds
    and is an alarm then.
    """

    def __init__(self, trackers: Sequence[Tracker], alarm: Callable[[Mapping[str, Any]], None]) -> None:
        self._workers = [_Worker(tracker, alarm) for tracker in trackers]

    def start(self, context: RunContext, config: Mapping[str, Any]) -> None:
        """Tell them that the run starts."""
        self._tell("start", context, config)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers of a step; what was not measured is not sent."""
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and v == v}
        self._tell("log", step, numbers)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Tell them that the run ended, and wait for them, within bounds."""
        self._tell("finish", summary)
        until = monotonic() + FINISH_SECONDS
        for worker in self._workers:
            worker.stop(max(0.0, until - monotonic()))

    def _tell(self, method: str, *arguments: Any) -> None:
        for worker in self._workers:
            worker.tell(method, arguments)


class _Worker:
    def __init__(self, tracker: Tracker, alarm: Callable[[Mapping[str, Any]], None]) -> None:
        self._tracker = tracker
        self._alarm = alarm
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(maxsize=10_000)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{type(tracker).__name__}", daemon=True)
        self._failure: str | None = None
        self._thread.start()

    def tell(self, method: str, arguments: tuple[Any, ...]) -> None:
        self._report()
        if self._failure is None and not self._calls.full():
            self._calls.put((method, arguments))

    def stop(self, seconds: float) -> None:
        if not self._calls.full():
            self._calls.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._failure = f"tracker {type(self._tracker).__name__} did not take everything by the end of the run"
        self._report()

    def _report(self) -> None:
        """One alarm for a failure; from the thread of the run."""
        if self._failure:
            message, self._failure = self._failure, ""
            self._alarm({"kind": "tracker", "message": message})

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments = call
            try:
                getattr(self._tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - a tracker never harms the run
                name = type(self._tracker).__name__
                self._failure = f"tracker {name} is switched off: {method} failed: {type(error).__name__}: {error}"
                return
