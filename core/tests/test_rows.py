"""Rows: every trained token was sampled after exactly the tokens before it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcore.learn.pack import micro_batches, pack
from rlcore.learn.rows import batch_of, rows_of
from rlcore.types import Batch, Completion, FinishReason, Group, Sample, Task, Trajectory, Turn


def turn(prompt: list[int], sampled: list[int], version: int = 0) -> Turn:
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(sampled)))
    return Turn(tuple(prompt), Completion(tuple(sampled), logprobs, FinishReason.STOP, version))


def trajectory(turns: list[Turn], reward: float | None = 1.0, name: str = "t", group: str = "g") -> Trajectory:
    return Trajectory(name, "task", group, turns=turns, reward=reward)


def test_turns_that_continue_each_other_are_one_row() -> None:
    rows = rows_of(trajectory([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [5])]), 0.5)
    assert [row.token_ids for row in rows] == [[1, 2, 3, 4, 9, 5]]
    assert rows[0].mask == [False, False, True, True, False, True]
    assert rows[0].turn_ids == [-1, -1, 0, 0, -1, 1]
    assert rows[0].advantages == [0.0, 0.0, 0.5, 0.5, 0.0, 0.5]
    assert math.isnan(rows[0].rollout_logprobs[0])


@pytest.mark.fault("MASK-03")
def test_a_rewritten_past_begins_a_new_row() -> None:
    """Where a template rewrote the history, nothing is trained on a prefix that was not there at sampling."""
    rows = rows_of(trajectory([turn([1, 2], [3, 4]), turn([1, 2, 4, 9], [5])]), 1.0)
    assert [row.token_ids for row in rows] == [[1, 2, 3, 4], [1, 2, 4, 9, 5]]
    assert [row.mask for row in rows] == [[False, False, True, True], [False, False, False, False, True]]
    assert [row.row for row in rows] == [0, 1]


@pytest.mark.fault("LOSS-21")
def test_every_step_of_an_attempt_carries_its_advantage() -> None:
    """Steps of length 2 and 5 of one attempt: every sampled token of both has the same advantage, none is 0."""
    rows = rows_of(trajectory([turn([1], [2, 3]), turn([7, 7], [4, 5, 6, 7, 8])]), 0.5)
    assert [a for row in rows for a, m in zip(row.advantages, row.mask, strict=True) if m] == [0.5] * 7


@pytest.mark.fault("MASK-15")
def test_examples_in_the_prompt_are_not_trained() -> None:
    """Whatever roles a prompt has, only sampled ids are in the mask."""
    (row,) = rows_of(trajectory([turn([1, 2, 3, 4, 5, 6], [7])]), 1.0)
    assert row.mask == [False] * 6 + [True]


def test_advantages_may_differ_by_turn() -> None:
    (row,) = rows_of(trajectory([turn([1], [2]), turn([1, 2, 3], [4])]), [1.0, -1.0])
    assert row.advantages == [0.0, 1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("attempt", "advantage", "message"),
    [
        (trajectory([turn([1], [2])], reward=None), 1.0, "no verdict"),
        (trajectory([turn([1], [2])]), [1.0, 2.0], "2 advantages for 1 turns"),
        (trajectory([turn([1], [2])]), math.nan, "not finite"),
        (
            trajectory([Turn((1,), Completion((2, 3), (-0.1,), FinishReason.STOP))]),
            1.0,
            "turn 0: 2 ids but 1 log-probs",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(attempt: Trajectory, advantage: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(attempt, advantage)


@pytest.mark.fault("LOSS-14")
def test_an_attempt_without_a_verdict_gives_no_row() -> None:
    group = Group("g", Task("task"), [trajectory([turn([1], [2])]), trajectory([turn([1], [2])], None, "u")])
    batch = batch_of([group], {"t": 1.0, "u": 1.0}, policy_version=3)
    assert [sample.trajectory_id for sample in batch.samples] == ["t"]


def test_a_completion_is_as_old_as_its_oldest_token() -> None:
    mixed = Turn((1,), Completion((2, 3), (-0.1, -0.1), FinishReason.STOP, policy_version=5, min_policy_version=4))
    (row,) = rows_of(trajectory([mixed]), 1.0)
    assert row.min_policy_version == 4


samples = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 9)), min_size=1, max_size=12)


def batch(shapes: list[tuple[int, int]]) -> Batch:
    def sample(n: int, group: int, length: int) -> Sample:
        mask = [False] + [True] * (length - 1)
        return Sample(
            f"t{n}", f"g{group}", "task", 0, list(range(length)), mask, [-1.0] * length, [1.0] * length,
            [0] * length, [0] * length, 1.0,
        )  # fmt: skip

    return Batch([sample(n, group, length) for n, (group, length) in enumerate(shapes)], policy_version=7)


@given(samples, st.integers(1, 20), st.sampled_from(["row", "group"]))
def test_packing_keeps_every_row_once_and_units_whole(shapes: list[tuple[int, int]], room: int, unit: str) -> None:
    whole = batch(shapes)
    packs = micro_batches(whole, room, unit)  # type: ignore[arg-type]
    assert sorted(i for p in packs for i in p) == list(range(len(shapes)))
    homes = [{whole.samples[i].group_id if unit == "group" else i for i in p} for p in packs]
    assert sum(map(len, homes)) == len(set().union(*homes))
    for members, home in zip(packs, homes, strict=True):
        assert sum(len(whole.samples[i].token_ids) for i in members) <= room or len(home) == 1


def test_a_packed_batch_says_where_each_row_is() -> None:
    packed = pack(batch([(0, 2), (1, 3), (0, 4)]), [2, 1])
    assert packed.cu_seqlens.tolist() == [0, 4, 7]
    assert packed.row_groups.tolist() == [0, 1]
    assert packed.row_trajectories.tolist() == [2, 1]
    assert packed.token_ids.dtype == np.int64
    assert packed.rollout_logprobs.dtype == np.float32
    assert packed.policy_version == 7
    doubled = packed.map(lambda array: array * 2)
    assert doubled.cu_seqlens.tolist() == [0, 8, 14]
    assert doubled.policy_version == 7
    assert doubled.old_logprobs is None


def test_nothing_packs_to_empty_arrays() -> None:
    assert pack(Batch([], 0)).cu_seqlens.tolist() == [0]
