"""Sixty odd folders and more: each is read, read with a warning, skipped by name, or refused with its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rlcore.errors import TaskError
from rlcore_tbench2.discovery import find_tasks
from rlcore_tbench2.folder import content_hash, read_folder
from rlcore_tbench2.taskset import TaskFolders

HARBOR = 'schema_version = "1.1"\n[environment]\n'
IMAGE = HARBOR + 'docker_image = "debian:12"\n'
DOCKER = {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n"}

ACCEPTED = {
    "image only": (IMAGE, {}, ""),
    "Dockerfile only": (HARBOR, DOCKER, ""),
    "image by digest": (HARBOR + f'docker_image = "python@sha256:{"0" * 64}"\n', {}, ""),
    "image with a date tag": (HARBOR + 'docker_image = "me/task:20251031"\n', {}, ""),
    "image and Dockerfile": (IMAGE, DOCKER, "both docker_image and Dockerfile; using the image"),
    "image and files": (IMAGE, {"environment/data.csv": "a\n"}, ""),
    "platform and digest": (
        HARBOR,
        {"environment/Dockerfile": f"FROM --platform=linux/amd64 a@sha256:{'1' * 64}\n"},
        "",
    ),
    "copy that is there": (
        HARBOR,
        {"environment/Dockerfile": "FROM a\nCOPY --chown=1 x /x\n", "environment/x": ""},
        "",
    ),
    "copy from a stage": (HARBOR, {"environment/Dockerfile": "FROM a AS b\nFROM a\nCOPY --from=b /x /y\n"}, ""),
    "copy by pattern": (HARBOR, {"environment/Dockerfile": "FROM a\nCOPY *.txt $X /y/\n"}, ""),
    "copy of all": (
        HARBOR,
        {"environment/Dockerfile": 'FROM a\nCOPY . /y\nCOPY --chmod=1 ["x y", "/z"]\n', "environment/x y": ""},
        "",
    ),
    "add of a URL": (HARBOR, {"environment/Dockerfile": "FROM a\nADD https://a.org/x /y\n"}, ""),
    "copy over two lines": (
        HARBOR,
        {"environment/Dockerfile": "FROM a\n# c\nCOPY x \\\n  /y\n", "environment/x": ""},
        "",
    ),
    "copy of a heredoc": (HARBOR, {"environment/Dockerfile": "FROM a\nCOPY <<E /y\nhi\nE\n"}, ""),
    "no shebang": (IMAGE, {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}, ""),
    "reward from a helper": (IMAGE, {"tests/test.sh": "python3 /tests/t.py\n", "tests/t.py": "open('reward.txt')"}, ""),
    "CRLF script": (
        IMAGE,
        {"tests/test.sh": "#!/bin/sh\r\necho 1 > reward.txt\r\n"},
        "tests/test.sh has CRLF line ends",
    ),
    "CRLF instruction": (IMAGE, {"instruction.md": b"a\r\nb\r\n"}, ""),
    "BOM in the instruction": (IMAGE, {"instruction.md": b"\xef\xbb\xbfDo it."}, ""),
    "instruction in Chinese": (IMAGE, {"instruction.md": "写文件 é\n"}, ""),
    "empty instruction": (IMAGE, {"instruction.md": ""}, "instruction.md is empty"),
    "no solution": (IMAGE, {}, ""),
    "extra files": (IMAGE, {"F2P.json": "{}", "evidence/log.txt": "", "README.md": "", "Cargo.toml": "[x"}, ""),
    "verifier needs the network": (
        IMAGE,
        {"tests/test.sh": "curl -L x.org | sh\necho 1 > reward.txt\n"},
        "the verifier needs",
    ),
    "verifier asks localhost": (
        HARBOR + 'docker_image = "a"\nnetwork_mode = "no-network"\n',
        {"tests/test.sh": "# curl a.org\ncurl http://localhost:8080\npip install --no-index x\necho 1 > reward.txt\n"},
        "",
    ),
    "compose by the wrong name": (
        HARBOR,
        {**DOCKER, "environment/docker-compose.yml": ""},
        "environment/docker-compose.yml is",
    ),
    "no network for both phases": (
        '[environment]\ndocker_image = "a"\n[agent]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "no-network"\n',
        {},
        "",
    ),
    "media that is there": (
        IMAGE,
        {"media.toml": '[[m]]\npath = "v.mp4"\nsha256 = "0"\n', "environment/v.mp4": ""},
        "",
    ),
    "unknown version": (
        'version = "2.0"\n' + IMAGE.split("\n", 1)[1],
        {},
        'version "2.0" is not a Harbor schema version',
    ),
    "name without organisation": (
        '[task]\nname = "x"\n' + IMAGE.split("\n", 1)[1],
        {},
        'task.name "x" has no "org/" part',
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_good_folders_are_read_with_the_right_warning(make_folder, case):
    toml, files, warning = ACCEPTED[case]
    folder = read_folder(make_folder(files=files, toml=toml))
    assert folder.unsupported == ()
    if warning:
        assert any(found.startswith(warning) for found in folder.warnings), folder.warnings
    else:
        assert folder.warnings == ()


UNSUPPORTED = {
    "compose": (HARBOR, {**DOCKER, "environment/docker-compose.yaml": "services: {}"}, "needs docker compose"),
    "compose alone": (HARBOR, {"environment/docker-compose.yaml": "services: {}"}, "needs docker compose"),
    "windows": (
        HARBOR + 'docker_image = "a"\nos = "Windows"\n',
        {"tests/test.sh": None, "tests/test.bat": ""},
        "needs windows",
    ),
    "steps": (
        "[environment]\n[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\n",
        DOCKER,
        "task declares 2 [[steps]]; multi-step",
    ),
    "a GPU": (IMAGE + 'gpus = 1\ngpu_types = ["T4"]\n', {}, "needs 1 GPU (T4)"),
    "GPUs": (IMAGE + 'gpus = 2\ngpu_types = ["A100-40GB", "H100"]\n', {}, "needs 2 GPUs (A100-40GB or H100)"),
    "a TPU": (IMAGE + 'tpu = {type = "v5", topology = "2x4"}\n', {}, "needs a TPU"),
    "MCP": (IMAGE + '[[environment.mcp_servers]]\nname = "db"\nurl = "http://db"\n', {}, "needs MCP servers (db)"),
    "separate verifier": (IMAGE + '[verifier]\nenvironment_mode = "separate"\n', {}, "needs a separate verifier"),
    "verifier environment": (
        IMAGE + "[verifier.environment]\ncpus = 1\n",
        {"tests/test.sh": None},
        "needs a separate verifier",
    ),
    "collect": (IMAGE + '[[verifier.collect]]\ncommand = "x"\n', {}, "needs [[verifier.collect]]"),
    "allow-list": (IMAGE + 'network_mode = "allowlist"\nallowed_hosts = ["db"]\n', {}, "needs a network allowlist"),
    "agent allow-list": (IMAGE + '[agent]\nnetwork_mode = "allowlist"\n', {}, "needs a network allowlist"),
    "networks that differ": (
        IMAGE + '[verifier]\nnetwork_mode = "no-network"\n',
        {},
        "needs network public for the agent and no-n",
    ),
    "local image": (HARBOR + 'docker_image = "localhost/x:1"\n', {}, "image localhost/x:1 is not pullable"),
    "verifier cut off": (
        IMAGE + "allow_internet = false\n",
        {"tests/test.sh": "apt-get install -y curl\necho 1 > reward.txt\n"},
        "the verifier needs the network",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_cannot_be_run_here_is_skipped_by_name_and_never_half_run(make_folder, case):
    toml, files, reason = UNSUPPORTED[case]
    path = make_folder(files=files, toml=toml)
    assert any(found.startswith(reason) for found in read_folder(path).unsupported)
    with pytest.raises(TaskError, match="1 not supported here"):
        TaskFolders(TaskFolders.Config(path=str(path))).load()
    with pytest.raises(TaskError) as refused:
        TaskFolders(TaskFolders.Config(path=str(path), skip="nothing")).load()
    assert reason in str(refused.value)


TB1 = {
    "task.yaml": "instruction: x",
    "run-tests.sh": "",
    "docker-compose.yaml": "",
    "task.toml": None,
    "instruction.md": None,
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"

REFUSED = {
    "no task.toml": (IMAGE, {"task.toml": None}, "no task.toml"),
    "terminal-bench 1": (IMAGE, TB1, "terminal-bench 1 task (task.yaml, no task.toml). Convert it first"),
    "no instruction": (IMAGE, {"instruction.md": None}, "instruction.md is missing"),
    "instruction in Latin-1": (
        IMAGE,
        {"instruction.md": "Größe".encode("latin-1")},
        "instruction.md: not UTF-8 (byte 2)",
    ),
    "task.toml in Latin-1": (IMAGE, {"task.toml": b'x = "\xe9"'}, "task.toml: not UTF-8 (byte 5)"),
    "no tests": (IMAGE, {"tests/test.sh": None}, "tests/test.sh: missing"),
    "tests by another name": (IMAGE, {"tests/test.sh": None, "tests/verify.sh": "reward"}, "tests/test.sh: missing"),
    "tests without a reward": (IMAGE, {"tests/test.sh": "pytest /tests\n"}, "tests/test.sh: no reward"),
    "no image": (HARBOR, {}, "no image: neither environment.docker_image"),
    "image by another key": (
        HARBOR + 'image = "x"\n',
        {"environment/data": ""},
        "no image: neither environment.docker_image",
    ),
    "copy that is missing": (
        HARBOR,
        {"environment/Dockerfile": "FROM a\nCOPY x y /z/\n", "environment/x": ""},
        "COPY of y, which",
    ),
    "Dockerfile in Latin-1": (
        HARBOR,
        {"environment/Dockerfile": b"FROM a\n# \xe9\n"},
        "environment/Dockerfile: not UTF-8",
    ),
    "LFS pointer": (IMAGE, {"tests/private.tar.gz": LFS}, "tests/private.tar.gz: only a Git LFS pointer"),
    "media that is missing": (
        IMAGE,
        {"media.toml": '[[m]]\npath = "v.mp4"\n'},
        "media.toml: the file v.mp4 is missing",
    ),
    "other tool": ("[sandbox]\n[grading]\n", {}, "not a Harbor task.toml: has [sandbox], [grading]"),
    "unknown own key": (IMAGE + "[metadata.rlcore]\nmax_comands = 1\n", {}, "unknown key metadata.rlcore.max_comands"),
    "own key of a wrong type": (
        IMAGE + "[metadata.rlcore]\nmax_commands = 0\n",
        {},
        "metadata.rlcore.max_commands must be",
    ),
    "own switch of a wrong type": (
        IMAGE + "[metadata.rlcore]\nimage_optional = 1\n",
        {},
        "metadata.rlcore.image_optional must",
    ),
    "examples that end with a user": (
        IMAGE + '[[metadata.rlcore.examples]]\nrole = "user"\ncontent = "x"\n',
        {},
        "metadata.rlcore.examples must end with an assistant",
    ),
    "examples of the wrong role": (
        IMAGE + '[[metadata.rlcore.examples]]\nrole = "system"\ncontent = "x"\n',
        {},
        "metadata.rlcore.examples[0].role must be user",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_folders_are_refused_with_file_and_key(make_folder, case):
    toml, files, message = REFUSED[case]
    path = make_folder(files=files, toml=toml)
    with pytest.raises(TaskError) as refused:
        read_folder(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


def test_sixty_odd_folders_and_more_are_covered():
    assert len(ACCEPTED) + len(UNSUPPORTED) + len(REFUSED) >= 60


def test_links_that_leave_the_task_or_run_in_a_circle_are_refused(make_folder, tmp_path):
    (tmp_path / "secret").write_text("x")
    for name, target, message in (
        ("leaving", "../../../secret", "link leaves the task"),
        ("absolute", str(tmp_path / "secret"), "link leaves the task"),
        ("circle", "data", "link to nothing or in a circle"),
        ("nothing", "absent", "link to nothing or in a circle"),
        ("parent", "..", "link to a folder that it lies in"),
    ):
        folder = make_folder(f"links/{name}", toml=IMAGE, files={"environment/keep": ""})
        os.symlink(target, folder / "environment" / "data")
        with pytest.raises(TaskError, match=message):
            read_folder(folder)
    inside = make_folder("links/inside", toml=IMAGE, files={"environment/keep": ""})
    os.symlink("keep", inside / "environment" / "data")
    assert read_folder(inside).warnings == ()


CANARY = "<!-- BENCHMARK DATA canary GUID 0 -->"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{CANARY}\n\nDo it.\n", "Do it.\n"),
        (f"# canary 1\n# canary 2\n# Title\nDo it.\n{CANARY}\n", f"# Title\nDo it.\n{CANARY}\n"),
        ("# A heading\n\nKeep the canary alive.\n", "# A heading\n\nKeep the canary alive.\n"),
        ("\n\nDo it.\n", "\n\nDo it.\n"),
        ("a\r\nb", "a\nb"),
    ],
)
def test_only_leading_canary_comments_are_taken_from_the_instruction(make_folder, text, shown):
    assert read_folder(make_folder(toml=IMAGE, files={"instruction.md": text.encode()})).instruction == shown


# --- discovery


def test_tasks_are_found_at_any_depth_and_what_is_passed_over_is_counted(make_folder, tmp_path):
    for name in (
        "b/one",
        "a/deep/er/two",
        "003. with space",
        "Capital-x",
        "_wip-x",
        ".hidden/x",
        "archive/x",
        "a/.zipbin/x",
    ):
        make_folder(f"set/{name}", toml=IMAGE)
    make_folder("set/template", files={"instruction.md": None}, toml=IMAGE)
    make_folder("set/capsule", files={"task.toml": None, "instruction.md": None, "environment/Dockerfile": "FROM a\n"})
    make_folder("set/inside/of/task", toml=IMAGE, files={"environment/inner/task.toml": IMAGE})
    os.symlink(tmp_path / "set" / "b", tmp_path / "set" / "again")
    found = find_tasks(tmp_path / "set")
    names = [path.relative_to(found.root).as_posix() for path in found.tasks]
    assert names == ["003. with space", "Capital-x", "a/deep/er/two", "b/one", "inside/of/task"]
    assert len(found.parked) == 4
    assert [path.name for path in found.templates] == ["template"]
    tasks = TaskFolders(TaskFolders.Config(path=str(tmp_path / "set"))).load()
    assert [task.id for task in tasks] == names


def test_a_root_that_is_a_task_is_one_and_gives_way_to_tasks_inside(make_folder, tmp_path):
    root = make_folder("root", toml=IMAGE)
    assert find_tasks(root).tasks == [root]
    make_folder("root/tasks/one", toml=IMAGE)
    found = find_tasks(root)
    assert found.tasks == [root / "tasks" / "one"]
    assert "is a task and holds 1 more" in found.warnings[0]
    assert find_tasks(root, include_root=True).tasks == [root]


def test_terminal_bench_1_folders_are_problems_and_name_their_twin(make_folder, tmp_path):
    make_folder("set/old/sort-it", files=TB1)
    twin = make_folder("set/harbor/sort-it", toml=IMAGE)
    ((path, message),) = TaskFolders(TaskFolders.Config(path=str(tmp_path / "set"))).report().problems
    assert path.name == "sort-it"
    assert message.startswith(f"{path}: terminal-bench 1 task (task.yaml, no task.toml).")
    assert message.endswith(f"A Harbor folder of the same name is {twin}.")
    with pytest.raises(TaskError, match="terminal-bench 1"):
        TaskFolders(TaskFolders.Config(path=str(tmp_path / "set" / "old"))).load()


@pytest.mark.parametrize("path", ["absent", "file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="no such folder"):
        TaskFolders(TaskFolders.Config(path=str(tmp_path / path))).load()


def test_the_content_hash_sees_names_bytes_and_the_executable_bit(make_folder):
    folder = make_folder(toml=IMAGE)
    seen = {content_hash(folder)}
    (folder / "tests" / "test.sh").chmod(0o755)
    seen.add(content_hash(folder))
    (folder / "instruction.md").write_text("Do that.")
    seen.add(content_hash(folder))
    (folder / "instruction.md").rename(folder / "instruction2.md")
    seen.add(content_hash(folder))
    assert len(seen) == 4
    assert content_hash(folder) == content_hash(Path(str(folder)))
