"""The task set keeps its contract."""

import pytest
from pydantic import ValidationError

from rlcore.testing.skeletons.taskset import Skeleton


def test_the_order_depends_on_the_options_alone() -> None:
    """Loaded twice, the tasks are the same; another seed gives others."""
    tasks = Skeleton(Skeleton.Config(count=10)).load()
    assert tasks == Skeleton(Skeleton.Config(count=10)).load()
    assert tasks != Skeleton(Skeleton.Config(count=10, seed=1)).load()


def test_ids_are_unique_and_tasks_are_complete() -> None:
    """Each has a question and an answer."""
    tasks = Skeleton(Skeleton.Config(count=50)).load()
    assert len({task.id for task in tasks}) == len(tasks) == 50
    assert all(task.messages and task.data["answer"] for task in tasks)


def test_an_empty_set_is_refused() -> None:
    """There is nothing to train on."""
    with pytest.raises(ValidationError):
        Skeleton.Config(count=0)
