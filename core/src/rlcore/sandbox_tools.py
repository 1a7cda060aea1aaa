"""What every sandbox backend needs: validated time-outs, bounded output as text, ends to the end, safe copies of folders.

A backend reads a stream through :class:`BoundedBytes` (or lets its agent keep head and tail) and turns the rest into text
with :func:`clipped_text`; :func:`pack_folder` and :func:`unpack_folder` are the two ends of ``upload_dir`` and
``download_dir`` and refuse everything that could leave the folder.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import socket
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.protocols import Sandbox

__all__ = [
    "BoundedBytes",
    "checked_timeout",
    "clipped_text",
    "close_all",
    "finished",
    "no_nul",
    "owner_is_gone",
    "ownership",
    "pack_folder",
    "process_start",
    "shares",
    "speaks_of_quota",
    "unpack_folder",
]

_MARKER_ROOM = 64


def checked_timeout(timeout: float) -> float:
    """The time-out as a finite positive float; ``ValueError`` for anything else (also for ``bool`` and text)."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"timeout must be a finite number of seconds above 0, got {timeout!r}")
    return float(timeout)


def shares(max_output: int) -> tuple[int, int]:
    """How many bytes of head and of tail are kept so that both and the marker stay within ``max_output``."""
    if max_output < 0:
        raise ValueError(f"max_output must not be negative, got {max_output}")
    room = max(0, max_output - _MARKER_ROOM) if max_output >= 2 * _MARKER_ROOM else max_output
    return room - room // 2, room // 2


class BoundedBytes:
    """Keeps the first and the last bytes of a stream of any length, in ``O(max_output)`` memory."""

    def __init__(self, max_output: int) -> None:
        self._whole = max_output
        self._head_size, self._tail_size = shares(max_output)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        if len(self._head) < self._whole and not self._tail:
            taken = self._whole - len(self._head)
            self._head += data[:taken]
            data = data[taken:]
        if data:
            self._tail += data[-self._whole :]
            if len(self._tail) > 2 * self._whole + 4096:
                del self._tail[: -self._whole or None]

    def whole(self) -> bytes:
        """Every byte of a stream that fitted; ``ValueError`` if it did not."""
        if self.total > self._whole:
            raise ValueError(f"{self.total} bytes came, {self._whole} were kept")
        return bytes(self._head)

    def text(self) -> tuple[str, bool]:
        """The text and whether something was left out."""
        if self.total <= self._whole:
            return clipped_text(bytes(self._head), b"", self.total), False
        tail = (bytes(self._head) + bytes(self._tail))[-self._tail_size :] if self._tail_size else b""
        return clipped_text(bytes(self._head[: self._head_size]), tail, self.total), True


def clipped_text(head: bytes, tail: bytes, total: int) -> str:
    """Text of a stream of ``total`` bytes of which ``head`` and ``tail`` were kept.

    Undecodable bytes become U+FFFD; a character that the cut went through is left out rather than shown broken.
    """
    missing = total - len(head) - len(tail)
    if missing <= 0:
        return (head + tail).decode("utf-8", "replace")
    for back in range(1, min(4, len(head)) + 1):
        lead = head[-back]
        if lead & 0xC0 != 0x80:
            length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            head = head[:-back] if length > back else head
            break
    start = 0
    while start < min(3, len(tail)) and tail[start] & 0xC0 == 0x80:
        start += 1
    tail = tail[start:]
    missing = total - len(head) - len(tail)
    return f"{head.decode('utf-8', 'replace')}\n[... {missing} bytes left out ...]\n{tail.decode('utf-8', 'replace')}"


async def close_all(sandboxes: Iterable[Sandbox]) -> None:
    """Close each to its end, then raise the first error: one that fails does not keep the others open."""
    for error in await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True):
        if error is not None:
            raise error


async def finished(task: asyncio.Future[Any]) -> None:
    """Wait to the end of a task, however often this one is cancelled meanwhile; then let the cancellation go on."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


def no_nul(*values: str) -> None:
    """``ValueError`` for what no command, path or environment can hold."""
    if any("\0" in value for value in values):
        raise ValueError("commands, paths and environments cannot hold a NUL byte")


def ownership(run_id: str) -> dict[str, str]:
    """Labels that say which run and which process a sandbox belongs to; the sweeper reads them."""
    owner = f"{socket.gethostname()}:{os.getpid()}:{process_start(os.getpid())}"
    return {"launcher": "rlcore", "run": run_id, "owner": owner}


def owner_is_gone(labels: Mapping[str, str]) -> bool | None:
    """Whether the process that a sandbox belongs to has ended; ``None`` if it ran on another machine or is not named."""
    host, pid, start = (["", "", "", *labels.get("owner", "").rsplit(":", 2)])[-3:]
    if host != socket.gethostname() or not pid.isdigit():
        return None
    return str(process_start(int(pid))) != start


def process_start(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (a process id alone may be another's by now); ``None``: it is gone."""
    path = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = path.read_text(errors="replace").rsplit(")", 1)[1].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def speaks_of_quota(text: str) -> bool:
    """Whether a provider's refusal means: later, when something is freed. The wordings are those seen in the wild.

    A bound on one sandbox ("cpu must be between 1 and 4") is a wrong configuration and not meant.
    """
    return _QUOTA.search(text) is not None and _BOUND.search(text) is None


_QUOTA = re.compile(
    r"limit (has been )?(exceeded|reached)|quota|too many|rate.?limit|throttl|capacity|maximum allowed|exhausted|"
    r"no available (runner|worker|host)|insufficient|try again later|in use: .* of",
    re.IGNORECASE,
)
_BOUND = re.compile(r"must be (between|at (least|most)|less|greater|lower|a )|per sandbox", re.IGNORECASE)


def pack_folder(source: Path, out: IO[bytes], *, owner: tuple[int, int] = (0, 0)) -> None:
    """Write the content of ``source`` as a tar stream: files, folders and links that stay inside; modes kept.

    ``owner`` (uid, gid) is written for every entry: who owns it on the other side, where that is heeded.

    Raises ``NotADirectoryError`` for anything but a folder and ``ValueError`` for a link that leaves it or for a device,
    socket or pipe. Nothing is read through a link.
    """
    if not source.is_dir():
        raise NotADirectoryError(f"{source} is not a folder")
    root = source.resolve()
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for folder, names, files in os.walk(root, followlinks=False):
            for name in sorted(names + files):
                path = Path(folder, name)
                _pack_one(tar, path, root, owner)


def _pack_one(tar: tarfile.TarFile, path: Path, root: Path, owner: tuple[int, int]) -> None:
    status = path.lstat()
    entry = tarfile.TarInfo(os.fspath(path.relative_to(root)))
    entry.mode = stat.S_IMODE(status.st_mode) & 0o777
    entry.mtime = int(status.st_mtime)
    entry.uid, entry.gid = owner
    if stat.S_ISLNK(status.st_mode):
        link = os.readlink(path)
        if os.path.isabs(link) or not Path(os.path.realpath(path)).is_relative_to(root):
            raise ValueError(f"{path} links to {link}, outside {root}: it cannot be uploaded")
        entry.type, entry.linkname = tarfile.SYMTYPE, link
        tar.addfile(entry)
    elif stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    elif stat.S_ISREG(status.st_mode):
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as content:
            entry.size = os.fstat(content.fileno()).st_size
            tar.addfile(entry, content)
    else:
        raise ValueError(f"{path} is neither a file nor a folder nor a link: it cannot be uploaded")


def unpack_folder(archive: IO[bytes], target: Path, *, max_bytes: int, strip: int = 0) -> None:
    """Write the files and folders of a tar stream from an untrusted sandbox below ``target``.

    Links, devices and everything else that is neither file nor folder is left out, so nothing can lead outside, now or
    when the folder is read later. ``strip`` leading path parts are dropped (Docker puts the folder's name in front).

    Raises ``ValueError`` for a name that leaves ``target`` or a content above ``max_bytes`` (a sparse file is small inside
    and huge here).
    """
    target.mkdir(parents=True, exist_ok=True)
    left = max_bytes
    with tarfile.open(fileobj=archive, mode="r|*", encoding="utf-8", errors="surrogateescape") as tar:
        for entry in tar:
            if entry.name.startswith("/") or "\0" in entry.name:
                raise ValueError(f"the sandbox sent the name {entry.name!r}, which is not below its folder")
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if ".." in parts:
                raise ValueError(f"the sandbox sent the name {entry.name!r}, which is not below its folder")
            parts = parts[strip:]
            if not parts or not (entry.isfile() or entry.isdir()):
                continue
            left -= max(entry.size, 0) + 512
            if left < 0:
                raise ValueError(f"the folder in the sandbox is larger than {max_bytes} bytes")
            folder = _real_folder(target, parts if entry.isdir() else parts[:-1])
            if entry.isfile():
                _unpack_file(tar, entry, folder / parts[-1])


def _real_folder(target: Path, parts: list[str]) -> Path:
    path = target
    for part in parts:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        path.mkdir(exist_ok=True)
    return path


def _unpack_file(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        raise ValueError(f"the sandbox sent a file where {path} is a folder")
    path.unlink(missing_ok=True)
    content = tar.extractfile(entry)
    assert content is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as out:
        shutil.copyfileobj(content, out)
        os.fchmod(out.fileno(), (entry.mode & 0o777) | 0o600)
