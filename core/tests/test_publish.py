"""Publishing weights: order, exactly once, and never a paused engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from rlcore.errors import PolicyUnavailable
from rlcore.rollout import publish as module
from rlcore.rollout.publish import publish
from rlcore.types import RunContext

pytestmark = pytest.mark.anyio


class Engine:
    """Records the calls; ``trouble`` maps a method to the errors of its next calls."""

    def __init__(self, **trouble: list[Exception]) -> None:
        self.calls: list[Any] = []
        self.trouble = trouble
        self.version = 0
        self.paused = False
        self.cached = True

    async def start(self, context: RunContext) -> None: ...

    async def aclose(self) -> None: ...

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.trouble.get(name):
            raise self.trouble[name].pop(0)

    async def pause(self) -> None:
        self._call("pause")
        self.paused = True

    async def update_weights(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        self._call(f"update {version}")
        await asyncio.sleep(0.05)
        self.version = version

    async def flush(self) -> None:
        self._call("flush")
        self.cached = False

    async def resume(self) -> None:
        self._call("resume")
        self.paused = False


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(module.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.05)))


@pytest.mark.fault("SYN-01")
async def test_an_update_pauses_updates_flushes_and_resumes_in_this_order() -> None:
    engine = Engine()
    await publish(engine, 1, [])
    assert engine.calls == ["pause", "update 1", "flush", "resume"]
    assert not engine.cached


@pytest.mark.fault("SYN-01")
async def test_a_flush_that_finds_the_engine_busy_is_tried_again() -> None:
    engine = Engine(flush=[PolicyUnavailable("busy")] * 2)
    await publish(engine, 1, [])
    assert engine.calls == ["pause", "update 1", "flush", "flush", "flush", "resume"]


@pytest.mark.fault("SYN-03")
async def test_a_resume_that_fails_twice_is_tried_again() -> None:
    engine = Engine(resume=[PolicyUnavailable("503")] * 2)
    await publish(engine, 1, [])
    assert not engine.paused


@pytest.mark.fault("SYN-03")
async def test_a_failed_update_still_resumes_and_the_old_version_serves() -> None:
    engine = Engine(**{"update 1": [PolicyUnavailable("chunk 2 of 3 failed")]})
    with pytest.raises(PolicyUnavailable, match="chunk 2 of 3"):
        await publish(engine, 1, [])
    assert not engine.paused
    assert engine.version == 0


@pytest.mark.fault("SYN-05")
async def test_an_engine_that_did_not_take_the_version_is_an_error() -> None:
    engine = Engine()

    async def ignore(version: int, weights: Any) -> None:
        engine.calls.append("ignored")

    engine.update_weights = ignore  # type: ignore[method-assign]
    with pytest.raises(PolicyUnavailable, match="serves version 0 after an update to version 3"):
        await publish(engine, 3, [])
    assert not engine.paused


@pytest.mark.fault("ASY-10")
async def test_a_cancelled_caller_leaves_exactly_one_whole_update() -> None:
    engine = Engine()
    caller = asyncio.create_task(publish(engine, 1, []))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert engine.calls == ["pause", "update 1", "flush", "resume"]
    assert engine.version == 1


@pytest.mark.fault("SYN-03")
async def test_a_pause_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_SECONDS", 0.05)
    engine = Engine()
    engine.pause = lambda: asyncio.sleep(60)  # type: ignore[method-assign]
    monkeypatch.setattr(module.asyncio, "sleep", asyncio.sleep)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await publish(engine, 1, [])
