"""What a run's tasks would stumble over is said before it starts."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from rlcore_tbench2.plugin import rlcore_preflight
from rlcore_tbench2.taskset import TaskFolders

IMAGE = '[environment]\ndocker_image = "debian:12"\n'


def problems(path, heldout=None, **options):
    def section(where):
        return None if where is None else SimpleNamespace(options=TaskFolders.Config(path=str(where), **options))

    evaluation = SimpleNamespace(taskset=section(heldout), unseen=None)
    return list(rlcore_preflight(SimpleNamespace(taskset=section(path), eval=evaluation)))


@pytest.fixture
def mixed(make_folder, tmp_path):
    make_folder("train/good", toml=IMAGE)
    make_folder("train/gpu", toml=IMAGE + "gpus = 1\n")
    for number in range(7):
        make_folder(f"train/bad{number}", toml=IMAGE, files={"tests/test.sh": None})
    return tmp_path / "train"


def test_broken_and_unsupported_folders_are_named_with_the_remedy(mixed):
    found = problems(mixed)
    assert [problem.fatal for problem in found] == [True] * 6 + [False]
    assert "bad0/tests/test.sh: missing" in found[0].message
    assert "2 more broken folders" in found[5].message
    assert "1 tasks cannot run here, such as gpu: needs 1 GPU" in found[6].message
    assert all(f"rlcore tasks check {mixed}" in problem.remedy for problem in found)
    assert not any(problem.fatal for problem in problems(mixed, skip="broken"))


def test_tasks_that_are_trained_and_evaluated_on_are_named_whatever_they_are_called(make_folder, tmp_path):
    first = make_folder("train/one", toml=IMAGE)
    make_folder("heldout/one", toml=IMAGE, files={"instruction.md": "Something else."})
    assert problems(tmp_path / "train", tmp_path / "heldout") == []
    shutil.copytree(first, tmp_path / "heldout" / "renamed")
    (found,) = problems(tmp_path / "train", tmp_path / "heldout")
    assert found.fatal
    assert "1 tasks are in taskset and in eval.taskset: one" in found.message


def test_a_missing_folder_is_a_problem_unless_a_recipe_is_going_to_write_it(tmp_path, monkeypatch):
    (found,) = problems(tmp_path / "absent")
    assert found.fatal
    assert "no such folder" in found.message
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    assert problems(tmp_path / "tasks" / "absent") == []
    (tmp_path / "empty").mkdir()
    (found,) = problems(tmp_path / "empty")
    assert "is a task that can run" in found.message


def test_other_task_sets_are_left_alone():
    other = SimpleNamespace(options=object())
    evaluation = SimpleNamespace(taskset=None, unseen=SimpleNamespace(taskset=other))
    assert list(rlcore_preflight(SimpleNamespace(taskset=other, eval=evaluation))) == []
