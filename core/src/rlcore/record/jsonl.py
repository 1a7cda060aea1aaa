"""Append-only JSON lines that survive a crash: every ledger and metric file of a run is one."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["JsonlWriter", "dumps", "plain", "read_jsonl"]

log = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """``value`` as strict JSON types; never raises for what ends up in a metric or a trace.

    NaN and infinities become ``None`` (JSON has none), lone surrogates U+FFFD, bytes text, sets sorted lists; numpy and
    torch scalars and arrays become numbers and lists; dataclasses and pydantic models mappings; anything else its text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_text(str(plain(key))): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, date | time):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    for method in ("tolist", "model_dump"):  # numpy and torch; pydantic
        if callable(convert := getattr(value, method, None)) and not isinstance(value, type):
            return plain(convert())
    return _text(str(value))


def dumps(value: Any) -> str:
    """One line of strict JSON in ASCII, so that no reader can split it at U+2028, U+2029 or U+0085."""
    return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class JsonlWriter:
    """Appends records to a file; one writer per file.

    Opening repairs the end that a crash may have left: a record that was cut is dropped with a warning, a complete
    one that lacks its newline gets it. Safe to call from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_end(path)
        self._file = path.open("ab")
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any], *, flush: bool = False) -> None:
        """Append one record; with ``flush`` it is in the hands of the operating system when this returns."""
        line = dumps(record).encode("ascii") + b"\n"
        with self._lock:
            self._file.write(line)
            if flush:
                self._file.flush()

    def flush(self) -> None:
        """Hand everything to the operating system: it survives the death of this process."""
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file in order; a missing file has none.

    Lines end at LF (or CRLF) alone. A line that is not a JSON object (the last one of a crashed process) is left out
    with a warning that names file and line.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            record = _parse(line)
            if record is None:
                log.warning("%s, line %d is not a complete JSON record and is left out", path, number)
            else:
                yield record


def _text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str(text)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _repair_end(path: Path) -> None:
    if not path.exists() or not (size := path.stat().st_size):
        return
    with path.open("rb+") as file:
        end, tail = size, b""
        while end and b"\n" not in tail:
            start = max(0, end - 65536)
            file.seek(start)
            tail = file.read(end - start) + tail
            end = start
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if _parse(last) is not None:
            file.seek(0, 2)
            file.write(b"\n")
        else:
            log.warning("%s ends in a record that was cut (%d bytes); it is dropped", path, len(last))
            file.truncate(size - len(last))
