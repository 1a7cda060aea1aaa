"""What the tests of the losses share: one thread, and how to make batches."""

import itertools

import pytest
import torch
from rlcore.types import Completion, FinishReason, Group, Message, MicroBatch, Task, Trajectory, Turn


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture
def trajectory_of():
    """Makes an attempt of so many turns of two tokens."""

    def make(name, reward, turns=1):
        completion = Completion((7, 8), (-1.0, -1.0), FinishReason.STOP, completion_tokens=2)
        made = [Turn((1, k), completion, (Message("user", "seen"),)) for k in range(turns)]
        return Trajectory(name, "task", "group", turns=made, reward=reward)

    return make


@pytest.fixture
def group_of(trajectory_of):
    """Makes a group with these rewards; its attempts are called ``NAME/0``, ``NAME/1``, …."""

    def make(rewards, name="g"):
        return Group(name, Task("task"), [trajectory_of(f"{name}/{i}", r) for i, r in enumerate(rewards)])

    return make


@pytest.fixture
def batch_of():
    """Makes a micro-batch from ragged lists of rollout log-probs; everything else has a plain default."""

    def make(rollout, old=None, mask=None, advantages=None, groups=None, trajectories=None, turns=None):
        lengths = [len(row) for row in rollout]
        total = sum(lengths)

        def flat(rows, default, dtype):
            values = [default] * total if rows is None else [x for row in rows for x in row]
            return torch.tensor(values, dtype=dtype)

        kept = flat(mask, True, torch.bool)
        zeros = torch.zeros(total, dtype=torch.int32)
        return MicroBatch(
            token_ids=zeros.long(),
            mask=kept,
            rollout_logprobs=flat(rollout, 0.0, torch.float32),
            advantages=flat(advantages, 1.0, torch.float32),
            turn_ids=flat(turns, 0, torch.int32).where(kept, zeros - 1),
            versions=zeros.where(kept, zeros - 1),
            cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            row_groups=torch.tensor(groups or list(range(len(rollout))), dtype=torch.int32),
            row_trajectories=torch.tensor(trajectories or list(range(len(rollout))), dtype=torch.int32),
            old_logprobs=None if old is None else flat(old, 0.0, torch.float32),
        )

    return make
