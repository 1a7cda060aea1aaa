"""The run's own machinery: what fails while a run is taken down is an alarm, never silence."""

from __future__ import annotations

import asyncio
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
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.05)
    made, alarms = run

    async def aclose() -> None:
        await asyncio.sleep(30)

    async with asyncio.timeout(5):
        await made._close(aclose)
    assert [alarm["kind"] for alarm in alarms] == ["close"]
    assert "aclose: no end within 0.05 s" in alarms[0]["message"]


async def test_a_part_that_fails_while_closing_is_an_alarm_and_others_close(run: Any) -> None:
    made, alarms = run

    async def aclose() -> None:
        raise PolicyUnavailable("the engine did not resume")

    await made._close(aclose)
    assert "the engine did not resume" in alarms[0]["message"]


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
