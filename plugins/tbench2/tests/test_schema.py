"""``task.toml`` as found in the wild: every file is accepted, accepted with a warning, or refused by its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlcore.errors import TaskError
from rlcore_tbench2.schema import TaskFile, parse_task_toml

CASES = json.loads((Path(__file__).parent / "data" / "task_toml_cases.json").read_text("utf-8"))


def seen(file: TaskFile) -> dict[str, object]:
    return {
        "schema": file.schema,
        "id": file.name,
        "agent_s": file.agent.timeout_sec,
        "verifier_s": file.verifier.timeout_sec,
        "build_s": file.build_timeout_sec,
        "image": file.docker_image,
        "cpus": file.cpus,
        "memory_mb": file.memory_mb,
        "storage_mb": file.storage_mb,
        "gpus": file.gpus,
        "net": file.network_mode,
        "workdir": file.workdir,
        "agent_net": file.agent.network_mode,
        "agent_hosts": list(file.agent.allowed_hosts),
        "verifier_net": file.verifier.network_mode,
        "steps": [step.name for step in file.steps],
        "strategy": file.multi_step_reward_strategy,
        "step_agent_s": [step.agent.timeout_sec for step in file.steps],
        "min_reward": [dict(step.min_reward) for step in file.steps],
    }


@pytest.mark.parametrize("case", CASES, ids=[case["title"] for case in CASES])
def test_files_of_every_dialect_are_read_as_expected(case):
    expect = dict(case["expect"])
    if not expect.pop("accept"):
        with pytest.raises(TaskError) as refused:
            parse_task_toml(case["text"], "some/task.toml")
        assert str(refused.value) == f"some/task.toml: {expect['message']}"
        return
    warnings = expect.pop("warn", [])
    file = parse_task_toml(case["text"], "some/task.toml")
    found = seen(file)
    assert {key: found[key] for key in expect} == expect
    assert len(file.warnings) == len(warnings)
    for wanted, warning in zip(sorted(warnings), sorted(file.warnings), strict=True):
        assert wanted.split("allow_internet")[-1] in warning


REFUSED = [
    ("[agent]\ntimeout_sec = true", "agent.timeout_sec must be a number of seconds, got the boolean true"),
    ("[agent]\ntimeout_sec = nan", "agent.timeout_sec must be a finite number of seconds above 0"),
    ("[agent]\ntimeout_sec = inf", "agent.timeout_sec must be a finite number of seconds above 0"),
    ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec must be a finite number of seconds above 0"),
    ("[verifier]\ntimeout_sec = -3", "verifier.timeout_sec must be a finite number of seconds above 0"),
    ("[environment]\nbuild_timeout_sec = []", "environment.build_timeout_sec must be a number of seconds, got a list"),
    ('[environment]\nmemory = "2GB"', 'environment.memory must be a string such as "2G"'),
    ('[environment]\nmemory = "2Gi"', 'environment.memory must be a string such as "2G"'),
    ('[environment]\nstorage = "512"', 'environment.storage must be a string such as "2G"'),
    ("[environment]\nstorage = true", 'environment.storage must be a string such as "2G"'),
    ('[environment]\nmemory_mb = "2G"', "environment.memory_mb must be a whole number"),
    ("[environment]\nmemory_mb = 2048.5", "environment.memory_mb must be a whole number"),
    ("[environment]\nmemory_mb = -1", "environment.memory_mb must be above 0"),
    ("[environment]\ncpus = inf", "environment.cpus must be a finite number above 0"),
    ("[environment]\ncpus = 0", "environment.cpus must be a finite number above 0"),
    ('[environment]\ncpus = "many"', "environment.cpus must be a number"),
    ("[environment]\ngpus = -1", "environment.gpus must not be negative"),
    ('[environment]\nworkdir = "app"', "environment.workdir must be an absolute path"),
    ('[environment]\nworkdir = "/app/../etc"', "environment.workdir must be an absolute path"),
    ('[environment]\nos = "beos"', "environment.os must be linux or windows"),
    ('[environment]\nnetwork_mode = "Public"', "environment.network_mode must be one of public, no-network, allowlist"),
    ('[agent]\nallowed_hosts = ["a.org"]', 'agent.allowed_hosts needs network_mode = "allowlist"'),
    (
        '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://a.org"]',
        "agent.allowed_hosts must hold hosts, *.hosts, addresses or networks",
    ),
    ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "verifier.environment_mode is shared, but"),
    ('[verifier]\nenvironment_mode = "apart"', "verifier.environment_mode must be shared or separate"),
    ("[verifier.env]\nA = true", 'verifier.env.A must be a string; write "true"'),
    ("[solution.env]\nA = [1]", "solution.env.A must be a string, got a list"),
    ("[environment]\nhealthcheck = {}", "environment.healthcheck.command is missing"),
    ("agent = 3", "agent must be a table, got the number 3"),
    ("version = 1.0", 'version must be a string such as "1.1"'),
    ('[task]\nname = "a/b/c"', "task.name must be org/name"),
    ('[task]\nname = "../x"', "task.name must be org/name"),
    ('[task]\nname = "a/b"\nauthors = ["Ann"]\n[metadata]', "task.authors must be an array of tables"),
    ('[[steps]]\nname = "a/b"', "steps[0].name must be usable as the name of one folder"),
    ('[[steps]]\nname = "a"\nmin_reward = "high"', "steps[0].min_reward must be a number or a table of numbers"),
    ('multi_step_reward_strategy = "max"\n[agent]', "multi_step_reward_strategy must be mean or final"),
    ("artifacts = 3\n[agent]", "artifacts must be a list"),
    ("[agent", "not TOML"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_impossible_values_are_refused_by_key(text, message):
    with pytest.raises(TaskError) as refused:
        parse_task_toml(text, "x/task.toml")
    assert str(refused.value).startswith(f"x/task.toml: {message}")


WARNED = [
    ('[agent]\ntimeout_sec = "900"', 'agent.timeout_sec is the string "900"; read as a number of seconds'),
    ('[environment]\nimage = "x"', "unknown key environment.image: value not used (docker_image?)"),
    ('[environment]\nentrypoint = "x"', "unknown key environment.entrypoint"),
    ("[environment]\ndocker_compose = true", "unknown key environment.docker_compose"),
    ("[agent.kwargs]\nmax_turns = 3", "unknown key agent.kwargs (with max_turns): not used"),
    ('[verifier]\ndifficulty = "easy"', "unknown key verifier.difficulty"),
    ('timeout_seconds = 3\ndifficulty = "easy"', "unknown key timeout_seconds: not used"),
    ("[agent]\n[verification]\nreward_type = 1", "unknown table verification: not used"),
    ('[task]\nid = "a"\n[metadata]', "[task] has no name; the folder's name is the id"),
    ('[task]\nname = "a/b"\ntimeout_sec = 3\n[metadata]', "unknown key task.timeout_sec"),
    ("[agent]\nallow_internet = false", "agent.allow_internet is not a key"),
    ('[environment]\nskills_dir = "/s"', "environment.skills_dir is not used"),
    ('[agent]\nartifacts = ["/x"]', "unknown key agent.artifacts: it stands below [agent]; did it belong above?"),
]


@pytest.mark.parametrize(("text", "warning"), WARNED, ids=[warning for _, warning in WARNED])
def test_what_is_not_used_is_named_and_refused_in_strict_mode(text, warning):
    file = parse_task_toml(text, "x/task.toml")
    assert any(found.startswith(warning) for found in file.warnings), file.warnings
    assert file.agent.timeout_sec in (None, 900.0)
    if "unknown" in warning:
        with pytest.raises(TaskError, match="unknown"):
            parse_task_toml(text, "x/task.toml", strict=True)


ACCEPTED = [
    ("[metadata]", {}),
    ('version = "1.0"\nschema_version = "1.2"', {"schema": "1.2"}),
    ('[environment]\nmemory = "4G"\nmemory_mb = 4096', {"memory_mb": 4096}),
    (
        '[environment]\nmemory_mb = "2048"\nstorage_mb = 512.0\ngpus = "0"',
        {"memory_mb": 2048, "storage_mb": 512, "gpus": 0},
    ),
    ("[environment]\ncpus = 0.5", {"cpus": 0.5}),
    ("[agent]\ntimeout_sec = 43200\n[verifier]\ntimeout_sec = 14400", {"agent_s": 43200.0, "verifier_s": 14400.0}),
    ('[environment]\nallow_internet = "false"', {"net": "no-network"}),
    ('[environment]\nnetwork_mode = "allowlist"', {"net": "allowlist"}),
    ('[agent]\nuser = "agent"\n[verifier]\nuser = 0', {}),
    ("[verifier.env]\n[environment.env]\n[solution.env]\n[environment]\nmcp_servers = []", {}),
    ('[[metadata.items]]\na = 1\n[[metadata.items]]\nb = """x\\\n  y"""', {}),
    ('artifacts = ["/out/", {source = "/a"}]\n[metadata]\nname = "测试 é"', {}),
]


@pytest.mark.parametrize(("text", "expect"), ACCEPTED, ids=[repr(text) for text, _ in ACCEPTED])
@pytest.mark.parametrize("dress", ["plain", "bom", "crlf", "no final newline"])
def test_variations_are_accepted_in_every_encoding_dress(text, expect, dress):
    data = (text + ("" if dress == "no final newline" else "\n")).encode()
    if dress == "bom":
        data = b"\xef\xbb\xbf" + data
    if dress == "crlf":
        data = data.replace(b"\n", b"\r\n")
    found = seen(parse_task_toml(data, "x/task.toml"))
    assert {key: found[key] for key in expect} == expect


@pytest.mark.fault("DAT-07")
@pytest.mark.parametrize(
    ("text", "megabytes"),
    [('memory = "8G"', 8192), ('memory = "512M"', 512), ('memory = "64K"', 1), ("memory_mb = 2048", 2048), ("", None)],
)
def test_sizes_of_every_schema_become_megabytes(text, megabytes):
    assert parse_task_toml(f"[environment]\n{text}\n", "x/task.toml").memory_mb == megabytes


@pytest.mark.fault("DAT-07")
@pytest.mark.parametrize("text", ["timeout_sec = 900", "timeout_sec = 900.0", 'timeout_sec = "900"'])
def test_time_outs_may_be_whole_fractional_or_text(text):
    assert parse_task_toml(f"[agent]\n{text}\n", "x/task.toml").agent.timeout_sec == 900.0


def test_authors_come_from_the_task_then_from_the_metadata():
    text = '[[task.authors]]\nname = "A"\n[metadata]\nauthor_name = "B"\nauthors = ["C"]'
    assert parse_task_toml(text, "x").authors == ({"name": "A", "email": ""},)
    text = '[metadata]\nauthor_name = "B"\nauthor_email = "anonymous"\nauthors = ["C"]'
    assert parse_task_toml(text, "x").authors == ({"name": "B", "email": "anonymous"},)


_values = st.recursive(
    st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=6) | st.sampled_from(["2G", "public", "1.1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=6,
)
_tables = ["task", "metadata", "agent", "verifier", "solution", "environment", "steps", "version", "artifacts", "other"]
_keys = ["timeout_sec", "memory", "memory_mb", "cpus", "env", "user", "network_mode", "name", "authors", "healthcheck"]


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value).replace("\\ud", "\\\\ud").replace("\x7f", "")
    return json.dumps(value)


@given(st.dictionaries(st.sampled_from(_tables), st.dictionaries(st.sampled_from(_keys), _values) | _values))
def test_any_toml_is_accepted_or_refused_and_never_crashes(raw):
    text = "\n".join(f"{key} = {_toml(value)}" for key, value in raw.items())
    message = ""
    try:
        parse_task_toml(text, "x/task.toml")
    except TaskError as error:
        message = str(error)
    assert not message or message.startswith("x/task.toml: ")
