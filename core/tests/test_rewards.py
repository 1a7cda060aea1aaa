"""Rewards of every shape: into a finite float, no verdict, or an error that says where."""

import asyncio
import functools
import time

import numpy as np
import pytest
import torch
from rlcore.errors import TaskError
from rlcore.rollout.rewards import call_reward, coerce_reward


@pytest.mark.fault("PLG-07")
@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (None, None),
    ],
)
def test_numbers_of_every_library_are_taken(value: object, reward: float | None) -> None:
    result = coerce_reward(value, "here")
    assert result == reward
    assert result is None or type(result) is float


@pytest.mark.fault("PLG-07")
@pytest.mark.parametrize(
    "value",
    [
        "1",
        {"reward": 1},
        (1, {}),
        [1],
        b"1",
        1j,
        float("nan"),
        float("inf"),
        float("1e400"),
        10**400,
        10**5000,
        np.float32("nan"),
        np.array([1.0, 2.0]),
        torch.tensor(float("nan")),
        torch.tensor([1.0, 2.0]),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_an_error_that_names_plugin_and_task(value: object) -> None:
    with pytest.raises(TaskError, match="agent loop of my-env, task t7: the reward is "):
        coerce_reward(value, "agent loop of my-env, task t7")


def plain(text: str) -> float:
    return len(text) / 10


async def slow_by_nature(text: str) -> float:
    await asyncio.sleep(0)
    return len(text) / 10


class Judge:
    def __call__(self, text: str) -> float:
        return len(text) / 10

    def method(self, text: str) -> float:
        return len(text) / 10


class AsyncJudge:
    async def __call__(self, text: str) -> float:
        return len(text) / 10


@pytest.mark.fault("PLG-06")
@pytest.mark.anyio
@pytest.mark.parametrize(
    "function",
    [
        plain,
        slow_by_nature,
        lambda text: len(text) / 10,
        functools.partial(plain),
        functools.partial(slow_by_nature),
        Judge(),
        Judge().method,
        AsyncJudge(),
    ],
)
async def test_reward_functions_of_every_shape_work(function: object) -> None:
    assert await call_reward(function, "five!", where="here") == 0.5  # type: ignore[arg-type]


@pytest.mark.fault("PLG-06")
@pytest.mark.anyio
async def test_a_blocking_reward_does_not_hold_up_the_others() -> None:
    def blocking() -> float:
        time.sleep(1.0)
        return 1.0

    gaps = []

    async def heartbeat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    beat = asyncio.create_task(heartbeat())
    assert await call_reward(blocking, where="here") == 1.0
    beat.cancel()
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.2
    assert len(gaps) > 5


@pytest.mark.anyio
async def test_what_a_reward_function_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        await call_reward(lambda: 1 / 0, where="here")
