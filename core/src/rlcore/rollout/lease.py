"""The lease of a sandbox: creates in flight, throttling, cancellation and the ledger, the same for every backend.

A backend does one thing at a time and keeps no books; the lease does the retrying and the bookkeeping. Every sandbox is
written to ``sandboxes.jsonl`` before it is asked for and after each change of its state, so that what a dead run left can
be told from what it closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.protocols import Sandbox, SandboxBackend
from rlcore.record.jsonl import JsonlWriter, read_jsonl
from rlcore.sandbox_tools import finished, ownership
from rlcore.types import SandboxSpec

__all__ = ["LeaseStats", "SandboxLease", "lifetimes"]

log = logging.getLogger("rlcore.sandboxes")

MARGIN_SECONDS = 1.0
"""What a step of closing may take beyond its bound, to say how it ended."""


@dataclass
class LeaseStats:
    """What the sandboxes of a run did; the run's summary shows it.

    Attributes:
        created: sandboxes that started.
        closed: sandboxes that were closed.
        throttled: creates that the provider refused for now.
        failed: creates that failed for good.
        close_errors: closes that failed or took too long; the sweeper may find the rest.
        reaped: sandboxes that came up after their attempt was cancelled, and were deleted.
        live: now.
        most_live: most at one time.
        seconds: sum of lifetimes, for the cost table.
        seconds_creating: sum of the time that successful creates took, waiting included.
    """

    created: int = 0
    closed: int = 0
    throttled: int = 0
    failed: int = 0
    close_errors: int = 0
    reaped: int = 0
    live: int = 0
    most_live: int = 0
    seconds: float = 0.0
    seconds_creating: float = 0.0


@dataclass
class _Breaker:
    """Counts an image's failures in a row; open means: it never started here and is not tried again."""

    failures: int = 0
    started: bool = False
    reason: str = ""


class _Admission:
    """How many sandboxes may live, learned from refusals; nothing is known at first.

    A refusal for a used-up quota says that one more than the live ones is too many. Nobody asks again until something is
    freed, except one probe every ``probe_s``: the quota may be shared with others, or have been raised.
    """

    def __init__(self, probe_s: float) -> None:
        self.limit: int | None = None
        self._probe_s = probe_s
        self._probe_at = 0.0
        self._freed = asyncio.Event()

    def refused(self, error: Throttled, spec: SandboxSpec, live: int, creating: int) -> None:
        """Learn from a refusal while ``live`` sandboxes were up and ``creating`` other creates had no answer yet."""
        limit = live + creating
        if error.cpus and spec.cpus:
            limit = min(limit, int(error.cpus / spec.cpus))
        if limit > 0 and error.quota:
            self.limit = limit if self.limit is None else min(limit, self.limit)
            self._probe_at = time.monotonic() + self._probe_s

    def grew(self, live: int) -> None:
        """A create succeeded: what was learned was too low if more are live now."""
        if self.limit is not None:
            self.limit = max(self.limit, live)

    def freed(self) -> None:
        """Something was closed."""
        self._freed.set()

    async def room(self, used: Callable[[], int]) -> None:
        """Wait until the learned quota has room, or it is time to ask again."""
        while self.limit is not None and used() >= self.limit:
            left = self._probe_at - time.monotonic()
            if left <= 0:
                self._probe_at = time.monotonic() + self._probe_s
                return
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._freed.wait()


class SandboxLease:
    """Leases the sandboxes of one run from one backend. Belongs to one event loop.

    ``async with lease.sandbox(spec, task_id=…) as sandbox:`` gives a started sandbox and closes it, shielded and within
    ``close_seconds``, whatever happens; a failing close never replaces a result or hides an exception.

    Args:
        backend: where sandboxes come from; the lease closes it.
        backend_name: its name in the configuration, for the ledger and messages.
        ledger_path: ``sandboxes.jsonl`` of the run.
        run_id: the run; every sandbox carries it as a label.
        creates_in_flight: creates at the same time; one that waits to retry does not count.
        retries: retries of a throttled create.
        backoff_base_s: first wait; doubles each time, with jitter; a provider's ``retry_after`` is the least.
        backoff_cap_s: longest wait.
        close_seconds: bound of a close.
        pool: sandboxes of each kind that wait started, for backends where a create is slow; none by default. One is handed
            out once, and only if it still lives.
        breaker_failures: an image whose first creates failed so often for good is not tried again.
        sleep: how to wait, for tests.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        backend_name: str,
        ledger_path: Path,
        run_id: str,
        creates_in_flight: int = 8,
        retries: int = 8,
        backoff_base_s: float = 2.0,
        backoff_cap_s: float = 30.0,
        close_seconds: float = 30.0,
        breaker_failures: int = 3,
        pool: int = 0,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.backend = backend
        self.backend_name = backend_name
        self.run_id = run_id
        self._labels = ownership(run_id)
        self.stats = LeaseStats()
        self._ledger = JsonlWriter(ledger_path)
        self._slots = asyncio.Semaphore(creates_in_flight)
        self._retries = retries
        self._base, self._cap = backoff_base_s, backoff_cap_s
        self._close_seconds = close_seconds
        self._breaker_failures = breaker_failures
        self._pool_size = pool
        self._warm: dict[str, list[tuple[str, Sandbox]]] = {}
        self._warming: dict[str, int] = {}
        self._breakers: dict[str, _Breaker] = {}
        self._admission = _Admission(backoff_cap_s)
        self._sleep = sleep
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open: dict[str, Sandbox] = {}
        self._born: dict[str, float] = {}
        self._creating = 0
        self._closed = False
        self._random = random.Random()

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec, *, task_id: str) -> AsyncIterator[Sandbox]:
        """A started sandbox for one attempt at a task.

        Raises (on entering): ``ConfigError`` for a spec that can never start, ``InfraError`` for a create that failed,
        ``Throttled`` when every retry was refused.
        """
        key, sandbox = await self._pooled(spec, task_id) if self._pool_size else await self._acquire(spec, task_id)
        try:
            yield sandbox
        finally:
            await finished(self._own(self._release(key, sandbox)))

    @property
    def close_bound(self) -> float:
        """Longest that :meth:`aclose` takes, in seconds: a caller with a bound of its own allows this much."""
        return 3 * self._close_seconds + 5 * MARGIN_SECONDS

    async def aclose(self) -> None:
        """Close every sandbox that is still open, wait for creates that were cancelled, close the backend and the ledger.

        Cut short by a cancel, it writes down as not closed what was not. Raises what the backend's own close raises; one
        that takes too long is a warning.
        """
        self._closed = True
        try:
            for _ in range(2):  # the second round: what came up meanwhile
                for key, sandbox in list(self._open.items()):
                    self._own(self._release(key, sandbox))
                await self._settled(self._close_seconds + MARGIN_SECONDS)
            await self._cut()
            try:
                async with asyncio.timeout(self._close_seconds):
                    await self.backend.aclose()
            except TimeoutError:
                log.warning("the sandbox backend %s did not close within %g s", self.backend_name, self._close_seconds)
        finally:
            try:
                await self._cut()
            finally:
                self._ledger.close()

    async def _settled(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    async def _cut(self) -> None:
        """Cancel what still goes on, and let it write down how it ended."""
        for task in self._tasks:
            task.cancel()
        await self._settled(MARGIN_SECONDS)

    # --- the pool -----------------------------------------------------------------------------------------------------

    async def _pooled(self, spec: SandboxSpec, task_id: str) -> tuple[str, Sandbox]:
        """One that waits, if one lives; a fresh one else. Either way the next ones are begun."""
        kind = repr(replace(spec, labels={}))
        waiting = self._warm.setdefault(kind, [])
        self._fill(kind, spec)
        while waiting:
            key, sandbox = waiting.pop(0)
            self._fill(kind, spec)
            try:
                lives = await sandbox.alive()
            except BaseException:
                self._own(self._release(key, sandbox))
                raise
            if lives:
                self._note(key, "leased", task=task_id, id=sandbox.id)
                return key, sandbox
            await finished(self._own(self._release(key, sandbox)))
        return await self._acquire(spec, task_id)

    def _fill(self, kind: str, spec: SandboxSpec) -> None:
        missing = self._pool_size - len(self._warm[kind]) - self._warming.get(kind, 0)
        for _ in range(missing if not self._closed else 0):
            self._warming[kind] = self._warming.get(kind, 0) + 1
            self._own(self._warm_one(kind, spec))

    async def _warm_one(self, kind: str, spec: SandboxSpec) -> None:
        try:
            made = await self._acquire(spec, "pool", retries=0)
        except (ConfigError, InfraError):
            return  # whoever needs one will ask, and hear why
        finally:
            self._warming[kind] -= 1
        self._warm[kind].append(made)

    # --- creating -----------------------------------------------------------------------------------------------------

    async def _acquire(self, spec: SandboxSpec, task_id: str, *, retries: int | None = None) -> tuple[str, Sandbox]:
        retries = self._retries if retries is None else retries
        if self._closed:
            raise InfraError("the run is closing its sandboxes")
        image = spec.image or spec.build_context or ""
        breaker = self._breakers.setdefault(image, _Breaker())
        begun = time.monotonic()
        key = secrets.token_hex(8)
        labels = {**spec.labels, **self._labels, "task": task_id, "lease": key}
        spec = replace(spec, labels=labels)
        for attempt in range(retries + 1):
            self._refuse_broken(image, breaker)
            async with self._slots:
                await self._admission.room(lambda: self.stats.live + self._creating)
                self._note(key, "creating", task=task_id, image=image or None, attempt=attempt)
                self._creating += 1
                try:
                    sandbox = await self._create(key, spec)
                except Throttled as error:
                    refused = error
                    self.stats.throttled += 1
                    self._note(key, "throttled", error=str(error), retry_after=error.retry_after)
                    self._admission.refused(error, spec, self.stats.live, self._creating - 1)
                except Exception as error:
                    self.stats.failed += 1
                    self._note(key, "failed", error=str(error))
                    breaker.failures += 1
                    breaker.reason = str(error)
                    raise
                else:
                    breaker.started, breaker.failures = True, 0
                    self.stats.seconds_creating += time.monotonic() - begun
                    return key, sandbox
                finally:
                    self._creating -= 1
            if attempt < retries:
                await self._sleep(self._wait(attempt, refused))
        raise refused

    async def _create(self, key: str, spec: SandboxSpec) -> Sandbox:
        """One create in a task of its own: a cancel of the caller leaves it to be reaped, never half-made."""
        task: asyncio.Task[Sandbox] = self._own(self.backend.start(spec))
        try:
            sandbox = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            self._own(self._reap(key, task))
            raise
        self._opened(key, sandbox)
        return sandbox

    async def _reap(self, key: str, task: asyncio.Task[Sandbox]) -> None:
        """Wait for a cancelled create; what it still brought is closed."""
        try:
            sandbox = await task
        except asyncio.CancelledError:
            self._note(key, "cancelled")
            return
        except Exception as error:  # noqa: BLE001 - whoever asked is gone: the ledger keeps it
            self._note(key, "cancelled", error=str(error))
            return
        self.stats.reaped += 1
        self._opened(key, sandbox)
        await self._release(key, sandbox)

    def _opened(self, key: str, sandbox: Sandbox) -> None:
        self._open[key] = sandbox
        self._born[key] = time.monotonic()
        self._admission.grew(self.stats.live + 1)
        self.stats.created += 1
        self.stats.live += 1
        self.stats.most_live = max(self.stats.most_live, self.stats.live)
        self._note(key, "live", id=sandbox.id)

    def _refuse_broken(self, image: str, breaker: _Breaker) -> None:
        if not breaker.started and breaker.failures >= self._breaker_failures:
            raise InfraError(
                f"the image {image or 'of the backend'} never started in {breaker.failures} attempts and is not tried "
                f"again in this run; the last reason was: {breaker.reason}"
            )

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, attempt: int, refused: Throttled) -> float:
        wait = min(self._cap, self._base * 2.0**attempt) * self._random.uniform(0.5, 1.0)
        return max(wait, refused.retry_after or 0.0)

    # --- closing ------------------------------------------------------------------------------------------------------

    async def _release(self, key: str, sandbox: Sandbox) -> None:
        """Close once, within the bound; a failure, a cancel among them, is a warning, a count and in the ledger."""
        if self._open.pop(key, None) is None:
            return
        self._note(key, "closing", id=sandbox.id)
        error: str | None = "the close was cancelled"
        try:
            async with asyncio.timeout(self._close_seconds):
                await sandbox.close()
            error = None
        except TimeoutError:
            error = f"not closed within {self._close_seconds:g} s"
        except SandboxLost:
            error = None
        except Exception as failure:  # noqa: BLE001 - a teardown's fault never replaces the result of the attempt
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self.stats.live -= 1
            self.stats.closed += 1
            self.stats.seconds += time.monotonic() - self._born.pop(key)
            self._admission.freed()
            if error is not None:
                self.stats.close_errors += 1
                log.warning(
                    "sandbox %s of %s: %s; `rlcore sandboxes sweep` finds it", sandbox.id, self.backend_name, error
                )
            self._note(key, "closed" if error is None else "close_failed", id=sandbox.id, error=error)

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note(self, key: str, state: str, **facts: Any) -> None:
        record = {"time": time.time(), "lease": key, "backend": self.backend_name, "run": self.run_id, "state": state}
        record.update((name, value) for name, value in facts.items() if value is not None)
        self._ledger.write(record, flush=True)


def lifetimes(ledger: Path) -> dict[str, Any]:
    """What the sandboxes of a run did, computed from its ledger alone.

    ``seconds`` is the sum of lifetimes (of those that were closed); ``not_closed`` are the ids that the ledger leaves open:
    the run died or a close failed.
    """
    born: dict[str, tuple[float, str]] = {}
    asked: dict[str, float] = {}
    waits: list[float] = []
    lives: list[float] = []
    count = dict.fromkeys(("created", "closed", "throttled", "failed", "cancelled", "close_failed"), 0)
    for record in read_jsonl(ledger):
        key, state, at = record.get("lease"), record.get("state"), float(record.get("time") or 0.0)
        if not isinstance(key, str):
            continue
        if state == "creating":
            asked.setdefault(key, at)
        elif state == "live":
            count["created"] += 1
            born[key] = (at, str(record.get("id")))
            waits.append(at - asked.get(key, at))
        elif state in count:
            count[state] += 1
            if state == "closed" and key in born:
                lives.append(at - born.pop(key)[0])
    return {
        **count,
        "not_closed": [sandbox_id for _, sandbox_id in born.values()],
        "seconds": sum(lives),
        "longest_life_seconds": max(lives, default=0.0),
        "mean_create_seconds": sum(waits) / len(waits) if waits else 0.0,
        "longest_create_seconds": max(waits, default=0.0),
    }
