"""The thread that owns the model: admits, prefills, decodes, aborts and updates, one thing at a time."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from rlcore.errors import PolicyUnavailable, Throttled
from rlcore.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from rlcore_engine.models import ModelSide
    from rlcore_engine.models.base import Prefilled

__all__ = ["Request", "Stats", "Worker"]

GATHER_SECONDS = 0.002
"""An idle worker waits so long after a request for the others that were sent with it: they share their prefill."""
ADMIT_TOKENS = 4096
"""Distinct prompt tokens that are prefilled together: what they need beside their slots is bounded by this."""
COLD = 1e-5
"""Below this temperature sampling is greedy: dividing by it would overflow."""

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Request:
    """One generation, from its arrival to its end. The worker alone writes to it after it was submitted.

    Attributes:
        id: unique among the requests that are not finished.
        prompt: ``[P]`` token ids.
        max_tokens: at least 1.
        temperature: 0: greedy.
        top_p: mass of the most likely tokens that may be sampled.
        top_k: number of them; −1: all.
        seed: of its random numbers.
        stop_ids: ids that end it; the one that did is its last token.
        notify: called from the worker's thread after each token and at the end.
        out: ``[T]`` sampled ids.
        logprobs: ``[T]`` ``rollout_logprobs``.
        versions: version of the weights that sampled the first and the last token.
        cached: prompt tokens whose keys and values were known.
        finish: why it ended; ``None`` while it has not.
        matched: the stop id that ended it.
        error: what went wrong, if it ended by a failure.
    """

    id: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_ids: frozenset[int]
    notify: Callable[[Request], None]
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[int, int] | None = None
    cached: int = 0
    finish: FinishReason | None = None
    matched: int | None = None
    error: Exception | None = None
    epoch: int = -1
    rule: Any = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and sampled ids."""
        return [*self.prompt, *self.out]


@dataclass(slots=True)
class Stats:
    """Counters since the start; seconds are wall clock."""

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    weight_updates: int = 0


class Worker:
    """Runs requests on a model in its own thread.

    Requests are served in order of arrival; at most ``slots`` decode together, at most ``queue`` wait. Every public
    method may be called from any thread.
    """

    def __init__(self, model: ModelSide, *, slots: int, queue: int, threads: int | None) -> None:
        """Start the thread; :meth:`stop` ends it."""
        self.model = model
        self.version = 0
        self.stats = Stats()
        self.paused = False
        self.failure: Exception | None = None
        self._slots = slots
        self._queue = queue
        self._threads = threads
        self._changed = threading.Condition()
        self._arrived: deque[Request] = deque()
        self._open: dict[str, Request] = {}
        self._aborts: set[str] = set()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._prefill: Generator[None, None, Prefilled] | None = None
        self._prefilling: list[Request] = []
        self._epoch = 0
        self._thread = threading.Thread(target=self._main, name="rlcore-engine", daemon=True)
        self._thread.start()

    # --- any thread ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            PolicyUnavailable: the worker has failed or stopped, the prompt is too long, or the id is in use.
            Throttled: the queue is full.
        """
        limit = self.model.context_length
        if not 0 < len(request.prompt) < limit:
            raise PolicyUnavailable(f"a prompt of {len(request.prompt)} tokens; the model takes 1 to {limit - 1}")
        with self._changed:
            if self.failure or self._stopping:
                raise PolicyUnavailable(f"the engine does not serve: {self.failure or 'it was stopped'}")
            if request.id in self._open:
                raise PolicyUnavailable(f"a request with the id {request.id!r} is running")
            if len(self._open) >= self._slots + self._queue:
                raise Throttled(
                    f"{len(self._open)} requests are open: {self._slots} slots and a queue of {self._queue}"
                )
            self._open[request.id] = request
            self._arrived.append(request)
            self._changed.notify()

    def abort(self, request_id: str | None) -> None:
        """End one request, or all, before the next token is sampled; unknown ids are fine."""
        with self._changed:
            self._aborts |= self._open.keys() if request_id is None else {request_id} & self._open.keys()
            self._changed.notify()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run something in the worker's thread between two steps; also while it is paused."""
        future: Future[Result] = Future()
        with self._changed:
            if self.failure or self._stopping:
                future.set_exception(
                    PolicyUnavailable(f"the engine does not serve: {self.failure or 'it was stopped'}")
                )
            else:
                self._calls.append((function, future))
                self._changed.notify()
        return future

    def running(self) -> frozenset[str]:
        """Ids of all requests that are neither finished nor aborted, waiting ones too."""
        with self._changed:
            return frozenset(self._open.keys() - self._aborts)

    def load(self) -> tuple[int, int]:
        """Number of requests in slots, and of those that wait for one."""
        with self._changed:
            active = len(self._active)
            return active, len(self._open) - active

    def stop(self) -> None:
        """Abort everything, end the thread and wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    # --- what is called through `call` --------------------------------------------------------------------------------

    def pause(self, *, retract: bool = False) -> None:
        """Sample nothing until :meth:`resume`. ``retract``: give up the slots; their requests are computed anew later."""
        self.paused = True
        if retract:
            self._undo_prefill()
            self._waiting.extendleft(reversed(self._active))
            while self._active:
                self._free(len(self._active) - 1, keep=False)

    def resume(self) -> None:
        """Go on."""
        self.paused = False

    def flush(self) -> None:
        """Forget every kept prefix, and keep nothing of what runs now either."""
        self._epoch += 1
        self._undo_prefill()
        self.model.forget()

    def update(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the weights, or raise and change nothing."""
        self.model.load(weights)
        self.version = version
        self.stats.weight_updates += 1
        self.flush()

    # --- the worker's thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            try:
                while self._wait():
                    self._work()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
                self.failure = error
        self._end()

    def _wait(self) -> bool:
        """Sleep until there is something to do, take it over, apply aborts and calls; false: stop."""
        with self._changed:
            idle = not self._waiting and not self._active and not self._prefilling
            while not self._ready():
                self._changed.wait()
            if idle and self._arrived and not self._calls:
                self._changed.wait_for(lambda: self._stopping, GATHER_SECONDS)
            if self._stopping:
                return False
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            aborts, self._aborts = self._aborts, set()
            calls, self._calls = list(self._calls), deque()
        if aborts:
            self._abort(aborts)
        for function, future in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - it is the caller's, who waits for it
                    future.set_exception(error)
        return True

    def _ready(self) -> bool:
        if self._stopping or self._calls or self._aborts:
            return True
        return not self.paused and bool(self._arrived or self._waiting or self._active or self._prefilling)

    def _work(self) -> None:
        if self.paused:
            return
        if not self._prefilling and self._waiting and len(self._active) < self._slots:
            self._prefilling = self._admit()
            self._prefill = self.model.prefill([request.tokens for request in self._prefilling])
        if self._prefill is not None:
            self._advance(self._prefill)
        if self._active:
            self._decode()

    def _admit(self) -> list[Request]:
        """The next requests for the free slots, in order of arrival."""
        from rlcore_engine.models.prefixes import common_prefix

        admitted: list[Request] = []
        room, last = ADMIT_TOKENS, list[int]()
        while self._waiting and len(self._active) + len(admitted) < self._slots:
            tokens = self._waiting[0].tokens
            room -= len(tokens) - common_prefix(tokens, last)
            if admitted and room < 0:
                break
            admitted.append(self._waiting.popleft())
            last = tokens
        return admitted

    def _advance(self, prefill: Generator[None, None, Prefilled]) -> None:
        """One chunk; at the end the first token of each request."""
        began = monotonic()
        try:
            next(prefill)
            return
        except StopIteration as end:
            done: Prefilled = end.value
        finally:
            self.stats.prefill_seconds += monotonic() - began
        fresh, self._prefilling, self._prefill = self._prefilling, [], None
        with self._changed:
            self._active += fresh
        for request, cached in zip(fresh, done.cached, strict=True):
            if not request.out:
                request.cached = cached
                self.stats.prompt_tokens += len(request.prompt)
                self.stats.cached_tokens += cached
            request.epoch = self._epoch
        self._sample(done.logits, len(self._active) - len(fresh))

    def _decode(self) -> None:
        began = monotonic()
        logits = self.model.decode([request.out[-1] for request in self._active])
        self._sample(logits, 0)
        self.stats.decode_steps += 1
        self.stats.decode_seconds += monotonic() - began

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """A token for each slot from ``first`` on."""
        from rlcore_engine.sampling import Rule, sample

        requests = self._active[first:]
        for request in requests:
            if request.rule is None:
                heat = request.temperature if request.temperature >= COLD else 0.0
                request.rule = Rule(heat, request.top_p, request.top_k, random.Random(request.seed))
        tokens, logprobs = sample(logits, [request.rule for request in requests])
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if logprob != logprob:
                request.error = PolicyUnavailable("the model's logits are not finite: its weights are broken")
                request.finish = FinishReason.UNKNOWN
                continue
            request.out.append(token)
            request.logprobs.append(logprob)
            request.versions = (request.versions[0] if request.versions else self.version, self.version)
            self.stats.generated_tokens += 1
            if token in request.stop_ids:
                request.finish, request.matched = FinishReason.STOP, token
            elif (
                len(request.out) >= request.max_tokens
                or len(request.prompt) + len(request.out) >= self.model.context_length
            ):
                request.finish = FinishReason.LENGTH
        for slot in range(len(self._active) - 1, first - 1, -1):
            if self._active[slot].finish is not None:
                request = self._free(slot, keep=True)
                self._close(request)
        for request in requests:
            if request.finish is None:
                request.notify(request)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _free(self, slot: int, *, keep: bool) -> Request:
        """Take a request out of its slot; the last one moves into it, here as in the model."""
        request = self._active[slot]
        usable = keep and request.epoch == self._epoch and request.error is None
        self.model.release(slot, keep=usable, poisoned=request.error is not None)
        with self._changed:
            last = self._active.pop()
            if slot < len(self._active):
                self._active[slot] = last
        return request

    def _close(self, request: Request) -> None:
        """The request has ended: say so."""
        with self._changed:
            self._open.pop(request.id, None)
            self._aborts.discard(request.id)
        self.stats.requests += 1
        self.stats.finished["error" if request.error else str(request.finish)] += 1
        request.notify(request)

    def _abort(self, ids: set[str]) -> None:
        for slot in range(len(self._active) - 1, -1, -1):
            if self._active[slot].id in ids:
                self._close_aborted(self._free(slot, keep=True))
        for request in [request for request in self._waiting if request.id in ids]:
            self._waiting.remove(request)
            self._close_aborted(request)
        if any(request.id in ids for request in self._prefilling):
            self._undo_prefill()
            self._abort(ids)

    def _close_aborted(self, request: Request) -> None:
        request.finish = FinishReason.ABORT
        self._close(request)

    def _undo_prefill(self) -> None:
        """Put what is being prefilled back to the front of the queue."""
        if self._prefill is not None:
            self._prefill.close()
        self._waiting.extendleft(reversed(self._prefilling))
        self._prefill, self._prefilling = None, []

    def _end(self) -> None:
        """Nobody is left waiting."""
        with self._changed:
            self._stopping = True
            left, calls = list(self._open.values()), list(self._calls)
            self._active, self._prefilling, self._prefill = [], [], None
            self._waiting.clear()
            self._calls.clear()
        reason = PolicyUnavailable(f"the engine failed: {self.failure}") if self.failure else None
        for request in left:
            request.error = reason
            request.finish = FinishReason.UNKNOWN if reason else FinishReason.ABORT
            self._close(request)
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(reason or PolicyUnavailable("the engine was stopped"))
