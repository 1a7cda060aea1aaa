"""The run's own machinery: what fails while a run is taken down is an alarm, never silence."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import pytest
from rlcore import loop
from rlcore.errors import PolicyUnavailable

pytestmark = pytest.mark.anyio


@pytest.fixture
def run() -> tuple[Any, list[Mapping[str, Any]]]:
    alarms: list[Mapping[str, Any]] = []
    made = object.__new__(loop._Run)
    made._alarm = alarms.append  # type: ignore[method-assign]
    return made, alarms


async def test_a_part_that_hangs_while_closing_is_bounded_and_an_alarm(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("rlcore.closing.CLOSE_SECONDS", 0.05)
    made, alarms = run

    async def aclose() -> None:
        await asyncio.sleep(30)

    async with asyncio.timeout(5):
        await made._close(aclose)
    assert [alarm["kind"] for alarm in alarms] == ["close"]
    assert "aclose: no end within 0.05 s" in alarms[0]["message"]


@pytest.mark.parametrize("error", [PolicyUnavailable, KeyError, TimeoutError])
async def test_a_part_that_fails_while_closing_is_an_alarm_and_others_close(run: Any, error: type[Exception]) -> None:
    made, alarms = run

    async def aclose() -> None:
        raise error("the engine did not resume")

    await made._close(aclose)
    assert "the engine did not resume" in alarms[0]["message"]


async def test_a_part_with_a_bound_of_its_own_is_not_cut_short(run: Any, monkeypatch: Any) -> None:
    """A lease closes its sandboxes within its own, longer bound."""
    monkeypatch.setattr("rlcore.closing.CLOSE_SECONDS", 0.01)
    made, alarms = run
    closed = []

    async def aclose() -> None:
        await asyncio.sleep(0.1)
        closed.append(True)

    await made._close(aclose, 5.0)
    assert (closed, alarms) == ([True], [])


async def test_a_part_that_closes_is_silent(run: Any) -> None:
    made, alarms = run

    async def aclose() -> None:
        pass

    await made._close(aclose)
    assert alarms == []


@pytest.mark.fault("ASY-09")
async def test_a_producer_that_ends_first_ends_the_step_with_its_error() -> None:
    async def produce() -> None:
        raise ExceptionGroup("attempts", [ZeroDivisionError("in the producer")])

    with pytest.raises(ZeroDivisionError, match="in the producer"):
        async with asyncio.timeout(5):
            await loop._beside(asyncio.create_task(produce()), asyncio.sleep(30))


async def test_a_step_that_fails_as_the_run_is_interrupted_prints_no_traceback() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("in the step")

    heard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["message"]))
    producer = asyncio.create_task(asyncio.sleep(30))
    beside = asyncio.create_task(loop._beside(producer, fail()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    beside.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beside
    del beside
    producer.cancel()
    gc.collect()
    await asyncio.sleep(0)
    assert heard == []
