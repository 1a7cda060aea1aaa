"""Control groups (version 1 or 2, whichever is there) for one sandbox; without them, resource limits do what they can."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ControlGroup", "remove"]

PERIOD_US = 100_000


@dataclass(frozen=True)
class ControlGroup:
    """The folders that hold one sandbox's limits; empty where control groups are not to be had.

    Attributes:
        folders: one for version 2, one per controller for version 1.
        memory: the folder whose counters tell of an out-of-memory kill.
    """

    folders: tuple[Path, ...] = ()
    memory: Path | None = None

    @classmethod
    def create(cls, name: str, *, memory: int, pids: int, cpus: float | None) -> ControlGroup:
        """Make the groups, or return the empty one if this process may not."""
        made: list[Path] = []
        try:
            roots = _roots()
            if isinstance(roots, Path):
                folder = _version_2(roots, name)
                made.append(folder)
                (folder / "memory.max").write_text(str(memory))
                _optional(folder / "memory.swap.max", "0")
                (folder / "pids.max").write_text(str(pids))
                if cpus is not None:
                    (folder / "cpu.max").write_text(f"{int(cpus * PERIOD_US)} {PERIOD_US}")
                return cls((folder,), folder)
            for controller in ("memory", "pids", "cpu"):
                folder = roots[controller] / "rlcore" / name
                folder.mkdir(parents=True)
                made.append(folder)
                if controller == "memory":
                    (folder / "memory.limit_in_bytes").write_text(str(memory))
                    _optional(folder / "memory.memsw.limit_in_bytes", str(memory))
                elif controller == "pids":
                    (folder / "pids.max").write_text(str(pids))
                elif cpus is not None:
                    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * PERIOD_US)))
            return cls(tuple(made), made[0])
        except (OSError, KeyError):
            remove(made)
            return cls()

    @property
    def procs(self) -> list[str]:
        """The files that a process writes its id to in order to join."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def oom_kills(self) -> int:
        """How often the memory limit killed something in the sandbox."""
        if self.memory is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            try:
                text = (self.memory / name).read_text()
            except OSError:
                continue
            for line in text.splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0


def remove(folders: tuple[Path, ...] | list[Path]) -> None:
    """Delete groups whose processes are gone; the kernel may need a moment to let go of them."""
    for folder in folders:
        for _ in range(50):
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.002)
            else:
                break


def _optional(path: Path, text: str) -> None:
    if path.exists():
        path.write_text(text)


def _roots() -> Path | dict[str, Path]:
    """The version 2 mount, or controller → the group of this process in version 1."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    second, first = None, {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup2":
            second = Path(mount)
        elif kind == "cgroup":
            for controller in options.split(","):
                if controller in ("memory", "pids", "cpu"):
                    inside = Path(mount + own.get(controller, ""))
                    first[controller] = inside if inside.is_dir() else Path(mount)
    if "memory" in first:
        return first
    if second is not None:
        return second
    raise OSError("no control groups are mounted")


def _version_2(root: Path, name: str) -> Path:
    wanted = "+memory +pids +cpu"
    parent = root / "rlcore"
    if not {"memory", "pids", "cpu"} <= set((root / "cgroup.controllers").read_text().split()):
        raise OSError("the controllers are not available")
    (root / "cgroup.subtree_control").write_text(wanted)
    parent.mkdir(exist_ok=True)
    (parent / "cgroup.subtree_control").write_text(wanted)
    folder = parent / name
    os.mkdir(folder)
    return folder
