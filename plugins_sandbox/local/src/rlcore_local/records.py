"""One small file per live sandbox, so that another process can list and end what a dead run left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlcore.errors import ConfigError
from rlcore.sandbox_tools import process_start

from rlcore_local.limits import remove

__all__ = ["Record", "Records"]


@dataclass(frozen=True)
class Record:
    """What is known of a sandbox from outside.

    Attributes:
        id: the sandbox's id.
        pid: its outermost process.
        started: start time of that process in clock ticks: a process id alone may be another's by now.
        created: seconds since the epoch.
        labels: as given.
        cgroups: folders to remove.
        folder: its files, in process isolation.
    """

    id: str
    pid: int
    started: int
    created: float
    labels: Mapping[str, str] = field(default_factory=dict)
    cgroups: tuple[str, ...] = ()
    folder: str | None = None

    def alive(self) -> bool:
        """Whether its process still runs."""
        return process_start(self.pid) == self.started


class Records:
    """The folder of records of one user."""

    def __init__(self, folder: str | None) -> None:
        self.folder = Path(os.path.realpath(folder or f"/tmp/rlcore-local-{os.getuid()}"))

    def prepare(self) -> Path:
        """The folder, private to this user; ``ConfigError`` if somebody else's hands are on it."""
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700, parents=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{self.folder} must be a folder of user {os.getuid()} with mode 0700: remove it, "
                "or set sandbox.state_dir to another folder"
            )
        return self.folder

    def add(self, record: Record) -> None:
        """Write atomically."""
        path = self.prepare() / f"{record.id}.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.rename(path)

    def discard(self, sandbox_id: str) -> None:
        """Forget a sandbox that is gone."""
        (self.folder / f"{sandbox_id}.json").unlink(missing_ok=True)

    def get(self, sandbox_id: str) -> Record | None:
        """The record of one sandbox."""
        if "/" in sandbox_id or sandbox_id.startswith("."):
            return None
        return _read(self.folder / f"{sandbox_id}.json")

    def live(self) -> Iterator[Record]:
        """Every live sandbox; what dead ones left is cleared away."""
        for path in sorted(self.folder.glob("*.json")):
            record = _read(path)
            if record is not None and record.alive():
                yield record
            elif record is not None:
                self.clear(record)

    def end(self, record: Record) -> None:
        """Kill a sandbox of another process and clear it away."""
        if record.alive():
            # in process isolation the agent must end what it started; bubblewrap takes everything with it
            os.kill(record.pid, signal.SIGTERM if record.folder else signal.SIGKILL)
            deadline = time.monotonic() + 15
            while record.alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            if record.alive():
                os.kill(record.pid, signal.SIGKILL)
        self.clear(record)

    def clear(self, record: Record) -> None:
        """Remove the record and what stands on disk."""
        remove([Path(path) for path in record.cgroups])
        if record.folder and Path(record.folder).parent == self.folder:
            shutil.rmtree(record.folder, ignore_errors=True)
        self.discard(record.id)


def _read(path: Path) -> Record | None:
    try:
        return Record(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
