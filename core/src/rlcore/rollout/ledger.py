"""The request ledger: every model request from intent to end, written before it is sent.

One JSON line per event in ``requests.jsonl``: ``intent`` (flushed before anything is sent), ``open`` (handed to the
client), then exactly one of ``answered``, ``cancelled`` (by us), ``failed`` (no usable answer) and ``aborted`` (by the
engine). A process that finds requests without an end in its file closes them as ``lost``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic, time

from rlcore.protocols import PolicyClient
from rlcore.record.jsonl import JsonlWriter, read_jsonl
from rlcore.types import ModelRequest

__all__ = ["RequestLedger"]

ENDS = ("answered", "cancelled", "failed", "aborted", "lost")
REMEMBERED = 100_000
"""Closed requests that are kept in memory to recognise zombies."""


class RequestLedger:
    """Keeps account of the requests of a run and reconciles it with the engine.

    Args:
        path: ``requests.jsonl`` of the run directory; ``None`` keeps the account in memory alone.
        clock: monotonic seconds.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._open: dict[str, float] = {}
        self._closed: dict[str, float] = {}
        self._ends: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._zombies: frozenset[str] = frozenset()
        self._rewritten = 0
        left_open = _without_end(path) if path is not None else []
        self._writer = JsonlWriter(path) if path is not None else None
        for request_id in left_open:
            self._close(request_id, "lost")

    def intent(self, request: ModelRequest, *, turn: int, new_row: bool = False) -> None:
        """A request is about to be sent.

        Args:
            request: the request.
            turn: number of the turn in its session.
            new_row: the template rewrote the past, so the whole conversation is a new prompt: counted, because it costs
                prefix caches and gives rows of fewer trained tokens.

        Raises:
            ValueError: the id was used before.
        """
        if request.id in self._open or request.id in self._closed:
            raise ValueError(f"request id {request.id} was used before: no request is sent twice")
        self._open[request.id] = self._clock()
        prompt_tokens = None if request.prompt_ids is None else len(request.prompt_ids)
        facts = {"session": request.session_id, "turn": turn, "prompt_tokens": prompt_tokens}
        facts |= {"max_tokens": request.max_tokens, "new_row": new_row or None}
        self._rewritten += new_row
        self._write("intent", request.id, facts, flush=True)

    def opened(self, request_id: str) -> None:
        """The request was handed to the client."""
        self._write("open", request_id)

    def answered(self, request_id: str, *, tokens: int, policy_version: int) -> None:
        """A usable completion came back."""
        self._close(request_id, "answered", tokens=tokens, policy_version=policy_version)

    def cancelled(self, request_id: str) -> None:
        """We gave up (an episode's clock, Ctrl-C); the client has aborted it at the engine."""
        self._close(request_id, "cancelled")

    def failed(self, request_id: str, reason: str, *, tokens: int | None = None) -> None:
        """No usable answer; ``tokens`` were sampled for nothing, if that is known."""
        self._close(request_id, "failed", tokens=tokens, reason=reason)

    def aborted(self, request_id: str, *, tokens: int | None = None) -> None:
        """The engine ended it before it was complete."""
        self._close(request_id, "aborted", tokens=tokens)

    @property
    def open_ids(self) -> frozenset[str]:
        """Requests without an end."""
        return frozenset(self._open)

    def reconcile(self, running: Iterable[str], *, asked: float | None = None) -> frozenset[str]:
        """Zombies: requests that the engine works on although they were closed here.

        Args:
            running: ids as the engine gave them.
            asked: this ledger's clock when the engine was asked; what was closed later is no zombie.
        """
        before = self._clock() if asked is None else asked
        self._zombies = frozenset(i for i in running if i in self._closed and self._closed[i] <= before)
        if self._zombies:
            self._write("zombies", None, {"ids": sorted(self._zombies)})
        return self._zombies

    async def sweep(self, client: PolicyClient) -> frozenset[str]:
        """Ask the engine what it works on, abort the zombies among it and return them."""
        asked = self._clock()
        running = await client.running()
        zombies = frozenset[str]() if running is None else self.reconcile(running, asked=asked)
        for request_id in sorted(zombies):
            await client.abort(request_id)
        return zombies

    def metrics(self) -> dict[str, int]:
        """Counts since this process began; the right value of ``zombie_requests`` is 0."""
        wasted = sum(tokens for end, tokens in self._tokens.items() if end != "answered")
        return {
            "open_requests": len(self._open),
            **{f"{end}_requests": self._ends[end] for end in ENDS},
            "rewritten_prompts": self._rewritten,
            "wasted_tokens": wasted,
            "zombie_requests": len(self._zombies),
        }

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the file; requests without an end stay so in it."""
        if self._writer is not None:
            self._writer.close()

    def _close(self, request_id: str, end: str, *, tokens: int | None = None, **facts: object) -> None:
        now = self._clock()
        started = self._open.pop(request_id, None)
        self._closed[request_id] = now
        if len(self._closed) > REMEMBERED:
            del self._closed[next(iter(self._closed))]
        self._ends[end] += 1
        self._tokens[end] += tokens or 0
        seconds = None if started is None else round(now - started, 4)
        self._write(end, request_id, {"tokens": tokens, "seconds": seconds, **facts})

    def _write(
        self, event: str, request_id: str | None, facts: Mapping[str, object] | None = None, *, flush: bool = False
    ) -> None:
        if self._writer is not None:
            record = {"event": event, "id": request_id, "time": round(time(), 3), **(facts or {})}
            self._writer.write({key: value for key, value in record.items() if value is not None}, flush=flush)


def _without_end(path: Path) -> list[str]:
    left: dict[str, None] = {}
    for record in read_jsonl(path):
        if record.get("event") == "intent":
            left[record["id"]] = None
        elif record.get("event") in ENDS:
            left.pop(record["id"], None)
    return list(left)
