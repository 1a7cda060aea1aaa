"""The bundled task set: real folders, disjoint pools, a right solution that passes and a wrong one that does not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rlcore.errors import ConfigError
from rlcore_tbench2.bundled import KINDS, NEVER_TRAINED, POOLS, TRAINED, write_tasks
from rlcore_tbench2.folder import content_hash
from rlcore_tbench2.grader import TaskGrader
from rlcore_tbench2.oracle import run_oracle
from rlcore_tbench2.taskset import TaskFolders


def load(folder: Path, **options):
    return TaskFolders(TaskFolders.Config(path=str(folder), **options)).load()


def words_of(task) -> tuple[set[str], set[str]]:
    """Pool words in the task itself, and in its examples."""
    everything = set().union(*map(set, POOLS.values()))
    own = " ".join(
        [
            task.messages[-1].content,
            *(p.read_text() + " " + p.name for p in Path(task.data["upload"]).rglob("*") if p.is_file()),
        ]
    )
    shown = " ".join(message.content for message in task.messages[:-1])
    return tuple(
        {w for w in text.replace(".", " ").replace("/", " ").split() if w in everything} for text in (own, shown)
    )


def test_there_are_enough_kinds_and_some_are_never_trained():
    assert len(KINDS) >= 12
    assert len(NEVER_TRAINED) >= 2
    assert {"sort", "head"} <= set(NEVER_TRAINED)
    assert set(TRAINED) | set(NEVER_TRAINED) == set(KINDS)
    assert {"write", "append", "copy", "rename", "delete", "count", "mkdir", "read_mkdir", "read_write"} <= set(TRAINED)


def test_the_pools_share_no_word():
    for one, other in itertools.combinations(POOLS, 2):
        assert not set(POOLS[one]) & set(POOLS[other])


def test_training_heldout_fresh_and_examples_use_their_own_pools_only(tmp_path):
    for split in ("train", "heldout", "fresh"):
        for task in load(write_tasks(tmp_path / split, split=split, kinds=list(KINDS), per_kind=3)):
            own, shown = words_of(task)
            assert own, task.id
            assert own <= set(POOLS[split])
            assert shown <= set(POOLS["demo"])
            assert len(shown) >= 2


def test_every_prompt_shows_two_solved_examples_of_its_own_kind(tmp_path):
    for task in load(write_tasks(tmp_path / "set", kinds=list(KINDS), per_kind=2)):
        *examples, asked = task.messages
        commands = task.data["max_commands"]
        assert len(examples) == 2 * 2 * commands
        assert [message.role for message in examples] == ["user", "assistant"] * (2 * commands)
        assert asked.content.split()[0] == examples[0].content.split()[0]
        assert sum(len(message.content.split()) for message in task.messages) < 60


def test_the_same_arguments_give_the_same_bytes_and_other_seeds_other_tasks(tmp_path):
    one, two, other = (
        write_tasks(tmp_path / name, per_kind=5, seed=seed) for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    assert content_hash(one) == content_hash(two)
    shared = {t.messages[-1].content for t in load(one)} & {t.messages[-1].content for t in load(other)}
    assert len(shared) < len(load(one)) / 2


def test_a_set_that_is_there_is_left_alone_and_another_one_replaced(tmp_path):
    folder = write_tasks(tmp_path / "set", per_kind=2)
    stamp = (folder / "write-0000").stat().st_ino
    write_tasks(folder, per_kind=2)
    assert (folder / "write-0000").stat().st_ino == stamp
    write_tasks(folder, per_kind=3)
    assert len(load(folder)) == 3 * len(TRAINED)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_larger_sets_begin_with_the_smaller_ones_and_no_task_comes_twice(tmp_path):
    small = {task.id: task.messages for task in load(write_tasks(tmp_path / "small", per_kind=4))}
    large = {task.id: task.messages for task in load(write_tasks(tmp_path / "large", per_kind=30))}
    assert small.items() <= large.items()
    asked = [(task.messages[-1].content, content_hash(Path(task.data["upload"]))) for task in load(tmp_path / "large")]
    assert len(set(asked)) == len(asked)


def test_own_pools_of_words_are_used(tmp_path):
    mine = [chr(97 + number) * 3 for number in range(14)]
    folder = write_tasks(tmp_path / "set", kinds=["write"], per_kind=2, words=mine, demo_words=[w + "x" for w in mine])
    assert load(folder)[0].messages[-1].content.split()[1] in mine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "unknown split 'test'; there are: train, heldout, fresh"),
        ({"split": "demo"}, "unknown split 'demo'"),
        ({"kinds": ["sing"]}, "unknown kind 'sing'; there are: write"),
        ({"per_kind": 0}, "per_kind must be at least 1"),
        ({"words": list(POOLS["demo"])}, "the pool of words and the pool of the examples share"),
        ({"words": ["a", "b"]}, "at least 12 different words"),
        ({"words": ["Ä"] * 12}, "is not a word of lower-case letters"),
        ({"kinds": ["mkdir"], "per_kind": 500}, "give no 500 different tasks"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        write_tasks(tmp_path / "set", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not a bundled task set"):
        write_tasks(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", [False, True])
async def test_every_kind_is_solved_by_its_solution_and_not_by_its_wrong_one(tmp_path, open_sandbox, wrong):
    tasks = load(write_tasks(tmp_path / "set", split="heldout", kinds=list(KINDS), per_kind=2))
    rows = await run_oracle(tasks, open_sandbox, TaskGrader(TaskGrader.Config()), concurrency=4, wrong=wrong)
    assert [row for row in rows if not row["ok"]] == []
    assert {row["reward"] for row in rows} == {0.0 if wrong else 1.0}
