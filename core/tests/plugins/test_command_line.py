"""The command line: early options, readable errors, help without a terminal, recipes and their own options."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcore.cli import main

Install = Callable[..., None]
Command = Callable[..., subprocess.CompletedProcess[str]]

PLUGIN = """
    from rlcore import hookimpl

    KINDS = {
        "tasksets": 1, "agent_loops": 1, "policy_clients": 1, "engines": 1, "trainers": 1,
        "advantages": 1, "corrections": 1, "losses": 1, "aggregations": 1,
    }

    def offering(hook):
        exec(f"def {hook}(register): register('mine', 'mine_impl:Thing')", scope := {})
        return hookimpl(scope[hook])

    for kind in KINDS:
        globals()[f"rlcore_register_{kind}"] = offering(f"rlcore_register_{kind}")

    @hookimpl
    def rlcore_register_recipes(register):
        register("mine", "mine_impl:Recipe")

    @hookimpl
    def rlcore_add_commands(group):
        group.lazy("greet", "mine_commands:greet", "Say a word.")
        group.lazy("many", "mine_commands:app", "Several.")
"""

IMPL = """
    from pydantic import BaseModel, ConfigDict, Field

    class Thing:
        "A thing of a test."
        class Config(BaseModel):
            model_config = ConfigDict(extra="forbid")
            size: int = Field(1, description="how large")
        def __init__(self, config): self.config = config

    class Recipe:
        description = "for a test"
        class Config(BaseModel):
            model_config = ConfigDict(extra="forbid")
            model_size: str = Field("big", description="which model")
            full: bool = Field(False, description="more evaluation")
        def __init__(self, config): self.config = config
        def configuration(self):
            sections = "taskset agent policy engine trainer advantage correction loss aggregation".split()
            return {name: {"name": "mine"} for name in sections} | {"model": {"path": self.config.model_size}}
        def preflight(self, run): return []
"""

COMMANDS = """
    import warnings
    import typer
    from rlcore.cli.app import command_group
    from rlcore.errors import RunFailed

    def greet(context: typer.Context, word: str = "hello", kind: str = "") -> int:
        print(word, *context.obj.named)
        if kind == "failed":
            raise RunFailed("the disk is full")
        if kind == "group":
            raise ExceptionGroup("tasks", [KeyError("k"), ExceptionGroup("inner", [RunFailed("one of many")])])
        if kind == "os":
            raise OSError(28, "No space left on device", "metrics.jsonl")
        if kind == "warn":
            warnings.warn("the floor is above 0")
        if kind == "bug":
            raise KeyError("oops")
        if kind == "interrupt":
            raise KeyboardInterrupt
        return 3 if kind == "three" else 0

    app = command_group("Several.")

    @app.command("first")
    def first() -> None:
        "A first one."
        print("first")
"""


@pytest.fixture
def mine(install: Install) -> None:
    install("mine-dist", {"mine": "mine_plugin"}, {"mine_plugin": PLUGIN, "mine_impl": IMPL, "mine_commands": COMMANDS})


@pytest.fixture
def run(mine: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command line in this process: status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


def test_version_and_module(rlcore: Command) -> None:
    assert rlcore("--version").stdout.startswith("rlcore 0.")


def test_early_options_hold_wherever_they_stand(run: Callable[..., Any]) -> None:
    for arguments in (
        ["-p", "mine", "greet"],
        ["greet", "-p", "mine"],
        ["greet", "--plugin=mine"],
        ["greet", "-pmine", "--word", "hello"],
        ["--plugin", "mine", "greet", "--no-plugin", "quickstart"],
    ):
        assert run(*arguments) == (0, "hello mine\n", ""), arguments
    status, _, err = run("greet", "--plugin")
    assert (status, err) == (2, "rlcore: error: --plugin needs the name of a plugin behind it\n")


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("three", 3, ""),
        ("failed", 1, "rlcore: error: the disk is full\n"),
        ("group", 1, "rlcore: error: one of many\n"),
        ("os", 1, "rlcore: error: [Errno 28] No space left on device: 'metrics.jsonl'\n"),
        ("bug", 1, "rlcore: error: KeyError: 'oops' (this should not happen; --traceback shows where)\n"),
        ("interrupt", 130, ""),
    ],
)
def test_every_end_has_its_status_and_one_line(run: Callable[..., Any], kind: str, status: int, message: str) -> None:
    assert run("greet", "--kind", kind) == (status, "hello\n", message)


def test_a_traceback_only_when_asked_for(run: Callable[..., Any]) -> None:
    status, _, err = run("greet", "--kind", "bug", "--traceback")
    assert status == 1
    assert "Traceback" in err
    assert err.endswith("shows where)\n")


@pytest.mark.fault("CFG-02")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grete"], "no command 'grete'; did you mean 'greet'?"),
        (["gree"], "no command 'gree'; did you mean 'greet'?"),
        (["greet", "--wor", "x"], "No such option: --wor; did you mean '--word'?"),
        (["greet", "--wrod=x"], "No such option: --wrod; did you mean '--word'?"),
        (["--plug", "x"], "No such option: --plug; did you mean '--plugin'?"),
        (["config", "show", "--orig"], "No such option: --orig; did you mean '--origin'?"),
        (["config", "show", "mine", "--model-siz", "x"], "No such option: --model-siz; did you mean '--model-size'?"),
        (["many", "frist"], "no command 'frist'; did you mean 'first'?"),
        (["greet", "more"], "Got unexpected extra argument(s) (more)"),
    ],
)
def test_unknown_and_abbreviated_options_are_errors(
    run: Callable[..., Any], arguments: list[str], message: str
) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == f"rlcore: error: {message}"
    assert err.splitlines()[1].startswith("try 'rlcore")


@pytest.mark.fault("CFG-10")
def test_help_of_every_command_works_without_a_terminal(run: Callable[..., Any]) -> None:
    from rlcore.cli.app import build
    from rlcore.plugins import load_plugins

    group = build(load_plugins())
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        lines = [[name]] + [[name, inner] for inner in getattr(command, "commands", ())]
        for line in lines:
            status, out, err = run(*line, "--help")
            assert (status, err) == (0, ""), line
            assert out.startswith(f"Usage: rlcore {' '.join(line)}")
            assert max(map(len, out.splitlines())) <= 80, line


def test_a_group_without_a_command_shows_its_help(run: Callable[..., Any]) -> None:
    for arguments in ([], ["many"]):
        status, _, err = run(*arguments)
        assert status == 2
        assert err.startswith("Usage: rlcore")


def test_the_output_may_be_cut_short(site: Path) -> None:
    command = f"{sys.executable} -m rlcore config schema --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_recipes_and_their_own_options(run: Callable[..., Any], tmp_path: Path) -> None:
    def shown(*arguments: str) -> dict[str, Any]:
        status, out, err = run("config", "show", "--json", *arguments)
        assert (status, err) == (0, "")
        return json.loads(out)

    assert shown("mine")["recipe"] == {"name": "mine", "model_size": "big", "full": False}
    assert shown("-p", "mine") == shown("mine")
    assert shown("mine", "--model-size", "small", "--full")["recipe"] == {
        "name": "mine",
        "model_size": "small",
        "full": True,
    }
    assert shown("--model_size=small", "-p", "mine", "--set", "loss.size=3")["model"]["path"] == "small"
    (tmp_path / "run.toml").write_text('recipe = {name = "mine", full = true}\nloss.size = 5\n')
    assert shown("--config", str(tmp_path / "run.toml"), "--set", "agent.size=1_000")["loss"]["size"] == 5
    status, out, _ = run("config", "show", "mine", "--help")
    assert status == 0
    assert "Options of recipe mine:\n  --model-size  which model\n  --full        more evaluation\n" in out


def test_a_plugin_names_the_recipe_of_a_model(run: Callable[..., Any], install: Install, tmp_path: Path) -> None:
    """Only where nothing else does and the run is not whole by itself; it is said, and stands in the origins."""
    selecting = """
        from rlcore import hookimpl

        @hookimpl
        def rlcore_select_recipe(model, hardware):
            assert hardware
            return {"known": "mine", "wrong": "minee"}.get(model)
    """
    install("select-dist", {"select": "select_plugin"}, {"select_plugin": selecting})
    status, out, err = run("config", "show", "--set", "model.path=known", "--set", "loss.size=3", "--json", "--origin")
    assert (status, err) == (0, "rlcore: recipe mine, for the model known\n")
    shown = json.loads(out)
    assert (shown["config"]["loss"], shown["config"]["model"]["path"]) == ({"name": "mine", "size": 3}, "known")
    assert shown["origin"]["recipe.name"] == "rlcore_select_recipe"
    part, whole = tmp_path / "part.toml", tmp_path / "whole.toml"
    part.write_text('model.path = "known"\n')
    sections = ["taskset", "agent", "policy", "engine", "trainer", "advantage", "correction", "loss", "aggregation"]
    whole.write_text('model.path = "known"\n' + "".join(f'{name}.name = "mine"\n' for name in sections))
    assert run("config", "show", "--config", str(part))[2] == err
    status, out, said = run("config", "show", "--config", str(whole), "--json")
    assert (status, said, json.loads(out)["recipe"]) == (0, "", None)
    for arguments, message in (
        (["--set", "model.path=unknown"], "name a recipe, or a file with --config"),
        (["--set", "run.steps=1"], "name a recipe, or a file with --config"),
        (["--set", "model.path=wrong"], "no recipe named 'minee'; did you mean 'mine'?"),
    ):
        status, _, said = run("config", "show", *arguments)
        assert status == 2
        assert message in said


def test_several_plugins_with_recipes_need_a_name(run: Callable[..., Any], install: Install) -> None:
    install(
        "two-dist",
        {"two": "two_plugin"},
        {
            "two_plugin": PLUGIN.replace("'mine', ", "'two', ")
            .replace('"mine", ', '"two", ')
            .replace('"greet"', '"greet2"')
            .replace('"many"', '"many2"')
        },
    )
    status, _, err = run("-p", "mine", "-p", "two_plugin", "config", "show")
    assert (status, err) == (2, "rlcore: error: plugins mine and two_plugin both offer recipes: name the recipe\n")
    assert run("-p", "two_plugin", "config", "show", "--json")[0] == 0


def test_a_saved_run_is_resolved_as_it_was(run: Callable[..., Any], tmp_path: Path) -> None:
    config = json.loads(run("config", "show", "mine", "--model-size", "small", "--json")[1])
    saved = tmp_path / "run"
    saved.mkdir()
    (saved / "manifest.json").write_text(json.dumps({"config": config, "plugins": {"hash": "of another set"}}))
    arguments = ("train", "--resume", str(saved), "--preflight", "--json")
    status, out, err = run(*arguments, "--no-plugin", "losses")  # which would try the pieces of this test
    assert (status, json.loads(out)) == (0, [])
    assert err == "rlcore: warning: the plugins are not those that this run began with\n"
    del config["loss"]
    config["agent"]["size"] = "large"
    (saved / "manifest.json").write_text(json.dumps({"config": config, "plugins": {"hash": "of another set"}}))
    status, _, err = run("train", "--resume", str(saved), "--set", "run.steps=x")
    assert status == 2
    for part in (
        "loss: is missing",
        f'agent.size: should be a valid integer, not "large" ({saved}/manifest.json)',
        "run.steps",
    ):
        assert part in err


def test_what_is_shown_can_be_read_again(run: Callable[..., Any], tmp_path: Path) -> None:
    _, first, _ = run("config", "show", "mine", "--set", 'run.id=héllo "quoted" \\ 1.10', "--set", "budget.seconds=.5")
    (tmp_path / "run.toml").write_text(first)
    status, second, err = run("config", "show", "--config", str(tmp_path / "run.toml"))
    assert (status, second, err) == (0, first, "")
    _, origins, _ = run("config", "show", "mine", "--origin", "--set", "loss.size=2")
    assert "loss.size = 2  # --set loss.size" in origins.splitlines()
    assert 'loss.name = "mine"  # recipe mine' in origins.splitlines()
    assert "run.steps = 100  # default" in origins.splitlines()


def test_without_a_recipe_the_known_ones_are_named(run: Callable[..., Any]) -> None:
    status, _, err = run("config", "show")
    assert status == 2
    assert "name a recipe, or a file with --config; there is: " in err
    assert "mine" in err


def test_schema_shows_types_defaults_and_meanings(run: Callable[..., Any]) -> None:
    status, out, _ = run("config", "schema", "mine")
    assert status == 0
    assert "loss.size (mine)\n    integer, default 1: how large\n" in out
    assert "rollout.top_p\n    number > 0 ≤ 1, default 1.0" in out
    schema = json.loads(run("config", "schema", "--json")[1])
    assert schema["offers"]["loss"]["mine"]["properties"]["size"]["default"] == 1
    assert schema["run"]["properties"]["rollout"]


def test_plugins_as_json(run: Callable[..., Any], install: Install) -> None:
    install("bad-dist", {"bad": "bad_plugin"}, {"bad_plugin": "import nope"})
    plugins = {plugin["name"]: plugin for plugin in json.loads(run("plugins", "list", "--json")[1])}
    assert json.loads(run("plugins", "--json")[1]) == list(plugins.values())
    assert plugins["mine"]["status"] == "ok"
    assert {"kind": "loss", "name": "mine", "target": "mine_impl:Thing"} in plugins["mine"]["offers"]
    assert (plugins["bad"]["status"], plugins["bad"]["distribution"]) == ("broken", "bad-dist")
    assert "No module named 'nope'" in plugins["bad"]["reason"]
    shown = run("plugins", "show", "mine")[1]
    assert "A thing of a test." in shown
    assert "size  default 1: how large" in shown
    assert "Traceback" in run("plugins", "show", "bad")[1]


def test_check_finds_what_breaks_the_rules(run: Callable[..., Any], install: Install) -> None:
    plugin = """
        import {heavy}
        from rlcore import hookimpl
        @hookimpl
        def rlcore_register_agent_loops(register):
            register("lax", "lax_impl:Lax")
        @hookimpl
        def rlcore_register_graders(register):
            register("gone", "lax_gone:Gone")
    """
    impl = """
        import numpy
        from pydantic import BaseModel
        class Lax:
            class Config(BaseModel):
                size: int = 1
            def run(self, task, episode): pass
    """
    install("lax-dist", {"lax": "lax_plugin"}, {"lax_plugin": plugin.replace("{heavy}", "json"), "lax_impl": impl})
    status, out, _ = run("plugins", "check", "lax")
    assert status == 1
    for line in (
        "its Config takes unknown keys",
        "option 'size' has no description",
        "Lax.run() must be async",
        "cannot load 'lax_gone:Gone'",
        "importing its modules fails: ModuleNotFoundError",
    ):
        assert line in out
    fixed = plugin.replace("{heavy}", "numpy").replace("lax_gone:Gone", "lax_impl:Lax")
    install("heavy-dist", {"heavy": "heavy_plugin"}, {"heavy_plugin": fixed})
    found = json.loads(run("plugins", "check", "heavy", "--json")[1])["heavy (heavy-dist 1.0)"]
    assert any("heavy_plugin imports numpy at its top" in line for line in found)
    assert any("Lax has no grade()" in line for line in found)


def test_shipped_plugins_keep_the_rules(rlcore: Command) -> None:
    done = rlcore("plugins", "check")
    assert done.returncode == 0, done.stdout


def test_warnings_are_one_line(rlcore: Command, mine: None) -> None:
    done = rlcore("greet", "--kind", "warn")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert done.stderr == "rlcore: warning: the floor is above 0\n"


def test_a_command_that_cannot_be_loaded_is_named(run: Callable[..., Any], install: Install) -> None:
    plugin = """
        from rlcore import hookimpl
        @hookimpl
        def rlcore_add_commands(group):
            group.lazy("lost", "not_there:command", "Nowhere.")
            group.lazy("train", "not_there:command", "A name that is taken.")
    """
    install("lost-dist", {"lost": "lost_plugin"}, {"lost_plugin": plugin})
    status, out, err = run("--help")
    assert status == 0
    assert "lost         Nowhere." in out or "lost       Nowhere." in out
    assert "the commands of plugin 'lost (lost-dist 1.0)' are missing: command 'train' is already there" in err
    status, _, err = run("lost")
    assert status == 2
    assert "command 'lost': cannot load 'not_there:command': ModuleNotFoundError" in err
