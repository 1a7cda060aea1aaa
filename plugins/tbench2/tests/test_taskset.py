"""From folders to tasks: filters, slices, limits, environment, and what the sandbox is asked for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rlcore.errors import ConfigError, TaskError
from rlcore.types import Message
from rlcore_tbench2.split import write_split
from rlcore_tbench2.taskset import TaskFolders

IMAGE = '[environment]\ndocker_image = "debian:12"\n'


def tasks_of(path, **options):
    return TaskFolders(TaskFolders.Config(path=str(path), **options)).load()


@pytest.fixture
def five(make_folder, tmp_path):
    for number in range(5):
        level = "easy" if number < 3 else "hard"
        make_folder(f"set/t{number}", toml=f'{IMAGE}[metadata]\ndifficulty = "{level}"\n')
    return tmp_path / "set"


@pytest.mark.fault("CFG-07")
@pytest.mark.parametrize(
    ("part", "numbers"),
    [("[-2:]", [3, 4]), ("[:-1]", [0, 1, 2, 3]), ("[1:3]", [1, 2]), ("[::2]", [0, 2, 4]), ("[::-1]", [4, 3, 2, 1, 0])],
)
@pytest.mark.parametrize("in_path", [True, False])
def test_slices_may_count_from_the_end(five, part, numbers, in_path):
    tasks = tasks_of(f"{five}@{part}") if in_path else tasks_of(five, slice=part)
    assert [task.id for task in tasks] == [f"t{number}" for number in numbers]


@pytest.mark.fault("CFG-07")
def test_an_empty_slice_says_that_there_are_no_tasks(five):
    with pytest.raises(TaskError, match="no tasks"):
        tasks_of(five, slice="[10:]")


@pytest.mark.parametrize("part", ["[x]", "3", "[1]", "[::0]", "[1:2:3:4]"])
def test_what_is_no_slice_is_refused_before_anything_is_read(part):
    with pytest.raises(ValidationError, match="slice"):
        TaskFolders.Config(path="nowhere", slice=part)


@pytest.mark.fault("DAT-09")
def test_filters_keep_the_order_and_an_empty_result_is_an_error(five):
    assert [task.id for task in tasks_of(five, where={"difficulty": "hard"})] == ["t3", "t4"]
    assert [task.id for task in tasks_of(five, include=("t[024]",), exclude=("t0",))] == ["t2", "t4"]
    with pytest.raises(TaskError, match="no tasks"):
        tasks_of(five, where={"colour": "red"})


@pytest.mark.fault("DAT-09")
def test_two_tasks_of_one_id_are_refused_by_both_folders(make_folder, tmp_path):
    for name in ("a", "b"):
        make_folder(f"set/{name}", toml=f'[task]\nname = "org/x"\n{IMAGE}')
    with pytest.raises(TaskError, match=r"b: duplicate id 'org/x', also of .*a"):
        tasks_of(tmp_path / "set")


def test_one_broken_folder_stops_unless_it_may_be_skipped(five, make_folder, caplog):
    make_folder("set/bad", files={"tests/test.sh": None}, toml=IMAGE)
    with pytest.raises(TaskError, match=r"bad/tests/test\.sh: missing"):
        tasks_of(five)
    assert len(tasks_of(five, skip="broken")) == 5
    assert "bad/tests/test.sh: missing" in caplog.text


def test_a_task_says_all_that_the_sandbox_the_agent_and_the_grader_need(make_folder, tmp_path):
    folder = make_folder(
        "set/one",
        files={"environment/Dockerfile": "FROM a\n", "instruction.md": "Do it."},
        toml="""
schema_version = "1.3"
[metadata]
difficulty = "hard"
[[metadata.rlcore.examples]]
role = "user"
content = "Q"
[[metadata.rlcore.examples]]
role = "assistant"
content = "A"
[agent]
timeout_sec = 90
user = "candidate"
[verifier]
timeout_sec = 45
user = "root"
[verifier.env]
KEY = "x${MISSING:-y}"
[environment]
cpus = 0.5
memory_mb = 300
storage_mb = 400
workdir = "/app"
network_mode = "no-network"
healthcheck = {command = "true"}
[environment.env]
MODE = "test"
""",
    )
    (task,) = tasks_of(tmp_path / "set")
    spec = task.sandbox
    assert task.id == "one"
    assert task.messages == (Message("user", "Q"), Message("assistant", "A"), Message("user", "Do it."))
    assert (spec.image, spec.build_context) == (None, str(folder / "environment"))
    assert (spec.cpus, spec.memory_mb, spec.disk_mb, spec.workdir, spec.user) == (0.5, 300, 400, "/app", "candidate")
    assert (spec.env, spec.network) == ({"MODE": "test"}, False)
    assert (task.agent_seconds, task.verifier_seconds) == (90.0, 45.0)
    assert task.data["verifier_user"] == "root"
    assert task.data["healthcheck"]["retries"] == 3
    assert "upload" not in task.data
    assert task.metadata == {"difficulty": "hard"}


@pytest.mark.parametrize(
    ("images", "docker_image", "dockerfile", "optional", "expect"),
    [
        ("auto", True, False, False, ("image", None, False)),
        ("auto", True, True, False, ("image", None, False)),
        ("auto", False, True, False, (None, "build", False)),
        ("auto", False, True, True, (None, None, True)),
        ("auto", False, False, True, (None, None, True)),
        ("always", False, True, True, (None, "build", False)),
        ("always", True, True, True, ("image", None, False)),
        ("dockerfile", True, True, False, (None, "build", False)),
        ("dockerfile", True, False, False, ("image", None, False)),
    ],
)
def test_which_image_a_task_gets_and_whether_its_files_are_uploaded(
    make_task, images, docker_image, dockerfile, optional, expect
):
    toml = '[environment]\nworkdir = "/app"\n' + ('docker_image = "image"\n' if docker_image else "")
    toml += f"[metadata.rlcore]\nimage_optional = {str(optional).lower()}\n"
    files = {"environment/Dockerfile": "FROM a\n"} if dockerfile else {}
    task = make_task(files=files, toml=toml, images=images)
    build = "build" if task.sandbox.build_context else None
    assert (task.sandbox.image, build, "upload" in task.data) == expect


def test_files_beside_an_image_without_dockerfile_are_uploaded(make_task):
    assert "upload" in make_task(files={"environment/a.csv": ""}, toml=IMAGE + 'workdir = "/app"\n').data


def test_limits_have_floors_caps_and_the_defaults_of_old_tools(make_task):
    toml = 'version = "1.0"\n[environment]\ndocker_image = "a"\n'
    assert make_task(toml=toml).sandbox.cpus is None
    spec = make_task(toml=toml, old_defaults=True).sandbox
    assert (spec.cpus, spec.memory_mb, spec.disk_mb) == (1, 2048, 10240)
    spec = make_task(
        toml=toml + "cpus = 0.5\nmemory_mb = 99999\n", min_cpus=1, min_disk_mb=5, max_memory_mb=4096
    ).sandbox
    assert (spec.cpus, spec.memory_mb, spec.disk_mb) == (1, 4096, 5)
    task = make_task(toml=toml + "[agent]\ntimeout_sec = 43200\n", max_agent_seconds=3600, max_verifier_seconds=60)
    assert (task.agent_seconds, task.verifier_seconds) == (3600, 60)
    with pytest.raises(ValidationError, match=r"min_cpus 4\.0 is above max_cpus 2\.0"):
        TaskFolders.Config(path="x", min_cpus=4, max_cpus=2)


def test_host_variables_enter_a_sandbox_only_by_name(make_task, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    toml = IMAGE + '[environment.env]\nA = "${JUDGE_KEY}"\nB = "${JUDGE_KEY:-none}"\n'
    with pytest.raises(TaskError, match=r"environment\.env\.A asks for the host variable JUDGE_KEY"):
        make_task(toml=toml)
    assert make_task(toml=toml, host_env=("JUDGE_KEY",)).sandbox.env == {"A": "secret", "B": "secret"}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(TaskError, match="the host variable JUDGE_KEY is not set and has no default"):
        make_task(toml=toml, host_env=("JUDGE_KEY",))
    assert make_task(toml=IMAGE + '[verifier.env]\nB = "${JUDGE_KEY:-none}"\n').data["verifier_env"]


# --- splits


def test_a_split_is_disjoint_stratified_repeatable_and_holds(five, tmp_path):
    report = TaskFolders(TaskFolders.Config(path=str(five))).report()
    sizes = write_split(report, tmp_path / "one", held_out=2, seed=0, by=["difficulty"])
    write_split(report, tmp_path / "two", held_out=2, seed=0, by=["difficulty"])
    assert sizes == {"train": 3, "eval": 2}
    for name in ("train.json", "eval.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    train = tasks_of(five, split=str(tmp_path / "one" / "train.json"))
    held = tasks_of(five, split=str(tmp_path / "one" / "eval.json"))
    assert {task.id for task in train} | {task.id for task in held} == {f"t{number}" for number in range(5)}
    assert not {task.id for task in train} & {task.id for task in held}
    assert sorted(task.metadata["difficulty"] for task in held) == ["easy", "hard"]


def test_a_task_that_changed_since_the_split_is_refused(five, tmp_path):
    report = TaskFolders(TaskFolders.Config(path=str(five))).report()
    write_split(report, tmp_path / "s", held_out=1, seed=3, by=[])
    (five / "t0" / "instruction.md").write_text("Other.")
    both = []
    for name in ("train", "eval"):
        try:
            both += tasks_of(five, split=str(tmp_path / "s" / f"{name}.json"))
        except TaskError as error:
            assert "t0 changed since the split" in str(error)  # noqa: PT017
    assert len(both) in (1, 4)


def test_a_split_file_that_is_none_or_names_absent_tasks_is_refused(five, tmp_path):
    report = TaskFolders(TaskFolders.Config(path=str(five))).report()
    write_split(report, tmp_path / "s", held_out=2, seed=0, by=[])
    with pytest.raises(ConfigError, match="no such file"):
        tasks_of(five, split=str(tmp_path / "absent.json"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a file that `rlcore tasks split` wrote"):
        tasks_of(five, split=str(tmp_path / "bad.json"))
    (tmp_path / "more.json").write_text('{"tasks": {"gone": "0"}}')
    with pytest.raises(TaskError, match=r"no such task below .*: gone"):
        tasks_of(five, split=str(tmp_path / "more.json"))
    with pytest.raises(ConfigError, match="must be between 1 and 4"):
        write_split(report, tmp_path / "s", held_out=5, seed=0, by=[])
