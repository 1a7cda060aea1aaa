"""The configuration: layers, types, errors with key, source and nearest name, and the way to JSON and back."""

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator
from rlcore import hookimpl
from rlcore.config import Secret
from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import KINDS, Plugin, Plugins
from rlcore.resolve import Layer, Resolved, build_options, file_layer, resolve, set_layer

Command = Callable[..., subprocess.CompletedProcess[str]]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Inner(Strict):
    deep: float = 1.0


class Thing:
    """Offered under every kind."""

    class Config(Strict):
        low: float = 0.0
        high: float = 2.0
        count: int = 1
        flag: bool = False
        image: str = "debian"
        tag: str | None = None
        limit: float | None = None
        user: str | int | None = None
        mode: Literal["a", "b"] = "a"
        path: Path = Path("x")
        inner: Inner = Inner()
        env: dict[str, str] = {}
        names: tuple[str, ...] = ()
        key: Secret | None = None

        @model_validator(mode="after")
        def _bounds(self) -> "Thing.Config":
            if self.low > self.high:
                raise ValueError(f"floor low={self.low:g} is above ceiling high={self.high:g}")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config


class Other:
    """Another one, whose author forgot to forbid unknown keys."""

    class Config(BaseModel):
        clip: float = 0.2

    def __init__(self, config: Config) -> None:
        self.config = config


class Bare:
    """Without a Config."""


class BaseRecipe:
    description = "for these tests"

    class Config(Strict):
        size: str = Field("big", description="which model")
        full: bool = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def configuration(self) -> dict[str, Any]:
        sections = {
            kind: {"name": "thing"}
            for kind in KINDS
            if kind not in ("recipe", "tracker", "launcher", "sandbox", "grader")
        }
        return sections | {
            "run": {"steps": 3},
            "model": {"path": self.config.size},
            "loss": {"name": "thing", "low": 0.5},
        }


class BrokenRecipe(BaseRecipe):
    def configuration(self) -> dict[str, Any]:
        raise KeyError("no such file")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    def offer(register: Any) -> None:
        register("thing", Thing)
        register("other", Other)
        register("bare", Bare)

    def recipes(register: Any) -> None:
        register("base", BaseRecipe)
        register("broken", BrokenRecipe)

    module = type("Module", (), {})
    for kind, hook in KINDS.items():
        function = recipes if kind == "recipe" else offer
        scope: dict[str, Any] = {"function": function}
        exec(f"def {hook}(register): function(register)", scope)
        setattr(module, hook, staticmethod(hookimpl(scope[hook])))
    plugins = Plugins()
    plugins.register(Plugin("test", "test"), module)
    return plugins


def get(plugins: Plugins, *settings: str, below: tuple[Layer, ...] = (), recipe: str | None = "base") -> Resolved:
    return resolve(plugins, [*below, set_layer(settings)], recipe)


def errors(plugins: Plugins, *settings: str, below: tuple[Layer, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as error:
        get(plugins, *settings, below=below)
    lines = str(error.value).splitlines()
    return [line.strip() for line in (lines[1:] if len(lines) > 1 else lines)]


def file(**sections: Any) -> Layer:
    return Layer("file run.toml", sections)


def test_later_layers_win_and_sources_are_kept(plugins: Plugins) -> None:
    resolved = get(
        plugins, "run.steps=7", "loss.high=3", below=(file(run={"seed": 5, "steps": 6}, loss={"high": 2.5}),)
    )
    assert (resolved.config.run.steps, resolved.config.run.seed, resolved.config.run.keep_checkpoints) == (7, 5, 2)
    assert resolved.config.loss.options == Thing.Config(low=0.5, high=3.0)
    assert resolved.origins["run.steps"] == "--set run.steps"
    assert resolved.origins["run.seed"] == "file run.toml"
    assert resolved.origins["loss.low"] == "recipe base"
    assert "run.keep_checkpoints" not in resolved.origins
    assert resolved.name == "base"


def test_the_recipe_gets_its_own_options_first(plugins: Plugins) -> None:
    resolved = get(plugins, "recipe.size=small")
    assert resolved.config.model.path == "small"
    assert isinstance(resolved.recipe, BaseRecipe)
    assert resolved.recipe.config.size == "small"
    assert get(plugins, "model.path=mine", "recipe.size=small").config.model.path == "mine"
    assert get(plugins, below=(file(recipe={"name": "base", "size": "file"}),), recipe=None).config.model.path == "file"
    assert errors(plugins, "recipe.sise=small") == [
        "recipe.sise: unknown key; did you mean 'size'? (--set recipe.sise)"
    ]


def test_another_name_drops_the_options_of_the_former(plugins: Plugins) -> None:
    below = (file(loss={"high": 1.5}),)
    assert get(plugins, "loss.name=other", below=below).config.loss.options == Other.Config(clip=0.2)
    assert get(plugins, "loss.clip=1", "loss.name=other", below=below).config.loss.options == Other.Config(clip=1.0)
    kept = get(plugins, "loss.name=Thing", below=below).config.loss.options
    assert (kept.low, kept.high) == (0.5, 1.5)


def test_sections_may_be_switched_off_and_on(plugins: Plugins) -> None:
    assert get(plugins).config.sandbox is None
    on = get(plugins, "sandbox.name=thing", "grader.name=other", "eval.taskset.name=thing", "eval.taskset.count=3")
    assert on.config.sandbox.options == Thing.Config()
    assert on.config.eval.taskset.options.count == 3
    assert get(plugins, "grader=null", below=(file(grader={"name": "other"}),)).config.grader is None


def test_trackers_are_a_list_with_options(plugins: Plugins) -> None:
    resolved = get(plugins, "trackers=[{name = 'thing', count = 4}, {name = 'other'}]")
    assert [tracker.options for tracker in resolved.config.trackers] == [Thing.Config(count=4), Other.Config()]
    found = errors(plugins, below=(file(trackers=[{"name": "thing", "cuont": 1}, {"name": "none"}, {}, 3]),))
    assert found == [
        "trackers.0.cuont: unknown key; did you mean 'count'? (file run.toml)",
        "trackers.1.name: no tracker named 'none'; there is: bare, other, thing (file run.toml)",
        "trackers.2.name: names no tracker; there is: bare, other, thing (file run.toml)",
        "trackers.3: should be a table of keys, not 3 (file run.toml)",
    ]


@pytest.mark.fault("CFG-01")
@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("2e-5", 2e-5), ("1E3", 1000.0), ("1_000", 1000.0), (".5", 0.5), ("-3", -3.0), ("1.", 1.0)],
)
def test_numbers_on_the_command_line(plugins: Plugins, text: str, value: float) -> None:
    for key in ("low", "inner.deep", "limit"):
        section = get(plugins, "loss.high=1e9", f"loss.{key}={text}").config.loss.options.model_dump()
        found = section["inner"]["deep"] if "." in key else section[key]
        assert found == value
        assert type(found) is float


@pytest.mark.fault("CFG-01")
@pytest.mark.parametrize(
    "text",
    ["1.10", "on", "no", "012", "1e5", "true", "", " x ", "0x10", "[a]", "a: b", "~", "'", '"x" # y', '"a" # "b"'],
)
def test_text_on_the_command_line_never_changes(plugins: Plugins, text: str) -> None:
    config = get(plugins, f"loss.image={text}", f"loss.tag={text}", f"loss.env.KEY={text}").config
    assert config.loss.options.image == text
    assert config.loss.options.tag == text
    assert config.loss.options.env == {"KEY": text}


@given(st.text().filter(lambda text: not (text.strip(" \t\r")[:1] in "\"'" and text.strip(" \t\r")[-1:] in "\"'")))
def test_text_on_the_command_line_never_changes_whatever_it_is(text: str) -> None:
    plugins = Plugins()
    module = type("Module", (), {"rlcore_register_recipes": staticmethod(hookimpl(_register))})
    plugins.register(Plugin("t", "t"), module)
    layer = set_layer([f"recipe.size={text}"])
    with contextlib.suppress(ConfigError):
        resolve(plugins, [layer], "text")
    assert Seen.last == text


class Seen:
    """A recipe that only remembers its option."""

    last = ""

    class Config(Strict):
        size: str

    def __init__(self, config: Config) -> None:
        Seen.last = config.size

    def configuration(self) -> dict[str, Any]:
        return {}


def _register(register: Any) -> None:
    register("text", Seen)


_register.__name__ = "rlcore_register_recipes"


@pytest.mark.fault("CFG-01")
def test_in_files_text_is_no_number_and_a_number_is_no_text(plugins: Plugins, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[loss]\nimage = 1.10\nlow = '1e-6'\ncount = 1.0\nflag = 1\nhigh = true\n")
    found = errors(plugins, below=(file_layer(path),))
    assert found == [
        f'loss.low: should be a valid number, not "1e-6" (file {path})',
        f"loss.high: should be a valid number, not true (file {path})",
        f"loss.count: should be a valid integer, not 1.0 (file {path})",
        f"loss.flag: should be a valid boolean, not 1 (file {path})",
        f"loss.image: should be a valid string, not 1.1: put it in quotes (file {path})",
    ]


def test_values_that_may_be_of_two_types(plugins: Plugins) -> None:
    def user(text: str) -> Any:
        return get(plugins, f"loss.user={text}").config.loss.options.user

    assert (user("1000"), user("root"), user("1.10"), user("null"), user('"1000"')) == (
        1000,
        "root",
        "1.10",
        None,
        "1000",
    )
    options = get(
        plugins, "loss.tag=null", 'loss.names=["a", "b"]', "loss.env={A = '1'}", "loss.path=null"
    ).config.loss.options
    assert (options.tag, options.names, options.env, options.path) == (None, ("a", "b"), {"A": "1"}, Path("null"))


@pytest.mark.fault("CFG-05")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rolout.top_p=1", "rolout: unknown key; did you mean 'rollout'?"),
        ("rollout.temprature=1", "rollout.temprature: unknown key; did you mean 'temperature'?"),
        ("loss.hihg=1", "loss.hihg: unknown key; did you mean 'high'?"),
        ("loss.inner.deeep=1", "loss.inner.deeep: unknown key; did you mean 'deep'?"),
        ("loss.key.envv=A", "loss.key.envv: unknown key; did you mean 'env'?"),
        ("eval.taskset.cuont=1", "eval.taskset.cuont: unknown key; did you mean 'count'?"),
        ("recipe.fulll=true", "recipe.fulll: unknown key; did you mean 'full'?"),
        ("advantage.clp=1", "advantage.clp: unknown key; did you mean 'clip'?"),
    ],
)
def test_unknown_keys_are_errors_at_every_level(plugins: Plugins, setting: str, message: str) -> None:
    names = ("eval.taskset.name=thing", "advantage.name=other")
    found = errors(plugins, *names, setting)
    assert any(line.startswith(message) for line in found), found
    assert all(line.endswith(f"(--set {setting.partition('=')[0]})") for line in found)


def test_all_errors_come_at_once_each_with_its_source(plugins: Plugins) -> None:
    found = errors(
        plugins,
        "run.steps=-1",
        "loss.name=thin",
        "agent.flag=on",
        below=(file(eval={"every": -5}, policy={"name": "bare"}, rollout=3, engine={"mode": "c"}),),
    )
    assert found == [
        'agent.flag: should be a valid boolean, not "on" (--set agent.flag)',
        "policy.name: policy 'bare' of test: Bare has no nested class Config(pydantic.BaseModel) (file run.toml)",
        "engine.mode: should be 'a' or 'b', not \"c\" (file run.toml)",
        "loss.name: no loss named 'thin'; did you mean 'thing'? (--set loss.name)",
        "run.steps: should be greater than or equal to 0, not -1 (--set run.steps)",
        "rollout: should be a table of keys, not 3 (file run.toml)",
        "eval.every: should be greater than or equal to 0, not -5 (file run.toml)",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.low=3"], "loss: floor low=3 is above ceiling high=2 (--set loss.low, recipe base)"),
        (
            ["budget.tokens_per_turn=9", "budget.tokens_per_session=8"],
            "budget: tokens_per_turn=9 is above tokens_per_s",
        ),
        (
            ["rollout.top_p=0.95"],
            "rollout.top_p: 0.95 would sample from the most likely tokens alone, while the trainer's",
        ),
        (["rollout.min_group=9"], "rollout: min_group=9 is above samples_per_task=8"),
        (["eval.every=1"], "eval: an evaluation needs held-out tasks: set eval.taskset.name (--set eval.every)"),
        (["budget.seconds=inf"], "budget.seconds: should be a finite number"),
        (["model.dtype=int8"], "model.dtype: should be 'auto', 'float32' or 'bfloat16', not \"int8\""),
    ],
)
def test_options_that_contradict_each_other_are_one_clear_error(
    plugins: Plugins, settings: list[str], message: str
) -> None:
    found = errors(plugins, *settings)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_without_a_recipe_everything_that_is_missing_is_named(plugins: Plugins) -> None:
    with pytest.raises(ConfigError) as error:
        get(plugins, recipe=None)
    assert all(f"{kind}: is missing" in str(error.value) for kind in ("taskset", "agent", "policy", "loss"))


@pytest.mark.parametrize("setting", ["x", "=1", "a b=1", ".a=1", "a.=1", "", "a\n=1"])
def test_a_setting_that_is_none_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="write it as KEY=VALUE"):
        set_layer([setting])


def test_options_of_single_sections_are_typed_and_refused_as_in_a_run(plugins: Plugins) -> None:
    sections = {"sandbox": Thing.Config, "loss": Other.Config}
    below = file(sandbox={"count": 2, "low": 0.5})
    built = build_options(plugins, [below, set_layer(["count=7", "sandbox.high=1e0"], "sandbox")], sections)
    assert built == {"sandbox": Thing.Config(count=7, low=0.5, high=1.0), "loss": Other.Config()}
    wrong = ["sandbox.cuont=7", "sandbox.count=x", "loss.clpi=1"]
    with pytest.raises(ConfigError) as error:
        build_options(plugins, [set_layer(wrong)], sections)
    of_a_run = errors(plugins, "sandbox.name=thing", "loss.name=other", *wrong)
    assert sorted(line.strip() for line in str(error.value).splitlines()[1:]) == sorted(of_a_run)
    with pytest.raises(ConfigError, match=r"^sandbx: unknown key; did you mean 'sandbox'\? \(--set sandbx.count\)$"):
        build_options(plugins, [set_layer(["sandbx.count=1"])], sections)
    with pytest.raises(ConfigError, match=r"^loss: should be a table of keys, as in loss.KEY=VALUE \(--set loss\)$"):
        build_options(plugins, [set_layer(["loss=1"])], sections)
    with pytest.raises(ConfigError, match=r"^--set loss.clip: write it as loss.KEY=VALUE$"):
        set_layer(["clip"], "loss")


def test_files_that_cannot_be_read_are_errors_that_name_them(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[run]\nsteps == 3\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: .*line 2"):
        file_layer(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        file_layer(tmp_path / "none.toml")


def test_a_recipe_that_fails_is_named(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="recipe 'broken' of test gives no configuration: KeyError"):
        get(plugins, recipe="broken")
    with pytest.raises(ConfigError, match=r"recipe\.name: no recipe named 'bse'; did you mean 'base'"):
        get(plugins, "recipe.name=bse", recipe=None)
    assert get(plugins, "recipe.name='base'", recipe=None).name == "base"


ODD = [None, "null", "true", "1e5", "[a]", "a: b", "", "None", "héllo", "1.10", "\u2028 \x00 \U0001f600"]


@pytest.mark.fault("CFG-04")
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_values_survive_json(plugins: Plugins, value: str | None) -> None:
    options = {"tag": value, "user": 12345678901234567890, "high": float("inf"), "names": ["null", "1e5"], "limit": 0.1}
    config = get(plugins, below=(file(loss={"env": {"K": str(value)}, **options}),)).config
    text = json.dumps(config.model_dump(mode="json"))
    again = resolve(plugins, [Layer("manifest", json.loads(text))], complete=True).config
    assert again == config
    assert again.loss.options == config.loss.options
    assert again.loss.options.tag == value
    assert type(again.loss.options.user) is int
    assert json.dumps(again.model_dump(mode="json")) == text


@pytest.mark.fault("CFG-04")
@given(
    tag=st.none() | st.text(alphabet=st.characters(codec="utf-8")),
    number=st.floats(min_value=2, allow_nan=False),
    user=st.none() | st.integers() | st.text(alphabet=st.characters(codec="utf-8")),
)
def test_any_value_survives_json(plugins: Plugins, tag: str | None, number: float, user: Any) -> None:
    config = get(plugins, below=(file(loss={"tag": tag, "high": number, "user": user}),)).config
    again = resolve(plugins, [Layer("manifest", json.loads(json.dumps(config.model_dump(mode="json"))))], complete=True)
    assert again.config.loss.options == config.loss.options == Thing.Config(low=0.5, tag=tag, high=number, user=user)


def test_a_saved_configuration_does_not_ask_the_recipe_again(plugins: Plugins) -> None:
    saved = get(plugins, "recipe.size=small").config.model_dump(mode="json")
    saved["recipe"]["name"] = "broken"
    resolved = resolve(plugins, [Layer("manifest", saved), set_layer(["run.steps=9"])], complete=True)
    assert resolved.config.model.path == "small"
    assert resolved.config.run.steps == 9


def test_a_secret_is_a_reference(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret\n")
    path = tmp_path / "key"
    path.write_text("from-file\n")
    for setting, value in (("key.env=MY_KEY", "sk-very-secret"), (f"key={{file = '{path}'}}", "from-file")):
        config = get(plugins, f"loss.{setting}").config
        assert config.loss.options.key.read() == value
        assert value not in f"{config!r} {config.model_dump_json()}"
    with pytest.raises(ConfigError, match="no secret in environment variable NOT_SET"):
        Secret(env="NOT_SET").read()
    with pytest.raises(ConfigError, match="no secret in file"):
        Secret(file=str(tmp_path / "none")).read()


@pytest.mark.parametrize("literal", ["sk-literal-9", "'sk-literal-9'", "['sk-literal-9']"])
def test_a_literal_secret_is_refused_and_not_repeated(plugins: Plugins, literal: str) -> None:
    found = errors(plugins, f"loss.key={literal}")
    assert found == [
        'loss.key: a secret is not written down: name where it is, {env = "NAME"} or {file = "path"} (--set loss.key)'
    ]
    both = errors(plugins, "loss.key={env = 'A', file = 'b'}")
    assert both == ["loss.key: name one place of the secret, env or file (--set loss.key)"]
