"""The hooks: every one is described, documented and called; observers do no harm."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore import hookimpl, hookspecs
from rlcore.errors import ConfigError, PluginError
from rlcore.plugins import KINDS, Plugin, Plugins
from rlcore.types import Problem

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if name.startswith("rlcore_")}
OBSERVERS = [name for name in HOOKS if name.rpartition("_")[2] in ("started", "finished", "published", "raised")]
DOCS = Path(__file__).parents[3] / "docs" / "plugins.md"


def make(**implementations: Any) -> Plugins:
    """Plugins with one plugin that has these hooks."""
    plugins = Plugins()
    add(plugins, "one", **implementations)
    return plugins


def add(plugins: Plugins, name: str, **implementations: Any) -> None:
    module = SimpleNamespace(**{hook: staticmethod_of(hook, function) for hook, function in implementations.items()})
    plugins.register(Plugin(name, name), module)


def staticmethod_of(hook: str, function: Any) -> Any:
    function.__name__ = hook
    return hookimpl(function)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_described_and_documented(hook: str) -> None:
    assert inspect.getdoc(HOOKS[hook]), f"{hook} has no docstring"
    assert f"`{hook}" in DOCS.read_text(encoding="utf-8"), f"{hook} is not in docs/plugins.md"
    assert HOOKS[hook].__annotations__["return"], f"{hook} does not say what it returns"


def test_every_hook_is_called() -> None:
    called: dict[str, dict[str, Any]] = {}

    def recorder(hook: str) -> Any:
        names = list(inspect.signature(HOOKS[hook]).parameters)
        scope: dict[str, Any] = {"called": called}
        exec(f"def {hook}({', '.join(names)}): called[{hook!r}] = dict({', '.join(f'{n}={n}' for n in names)})", scope)
        return scope[hook]

    plugins = make(**{hook: recorder(hook) for hook in HOOKS})
    plugins.configure("config")  # type: ignore[arg-type]
    plugins.preflight("config")  # type: ignore[arg-type]
    plugins.select_recipe("model", "hardware")
    plugins.add_commands("group")  # type: ignore[arg-type]
    for hook in OBSERVERS:
        plugins.notify(hook, **{name: name for name in inspect.signature(HOOKS[hook]).parameters})
    assert set(called) == set(HOOKS)
    assert called["rlcore_step_finished"] == {"step": "step", "metrics": "metrics"}


def test_every_kind_has_its_hook() -> None:
    registering = {hook for hook in HOOKS if hook.startswith("rlcore_register_")}
    assert set(KINDS.values()) == registering


def test_an_observer_that_raises_is_switched_off_with_one_warning() -> None:
    seen: list[str] = []

    def bad(step: int) -> None:
        seen.append("bad")
        raise ValueError("disk full")

    def exits(step: int) -> None:
        raise SystemExit(1)

    def good(step: int, metrics: Any) -> None:
        seen.append(f"good {step}")

    warnings: list[str] = []
    plugins = make(rlcore_step_finished=good)
    plugins.warn = warnings.append
    add(plugins, "two", rlcore_step_finished=bad, rlcore_run_finished=lambda run_id: seen.append("late"))
    add(plugins, "three", rlcore_step_finished=exits)
    for step in (1, 2, 3):
        plugins.notify("rlcore_step_finished", step=step, metrics={})
    plugins.notify("rlcore_run_finished", run_id="r", summary={})
    assert seen == ["bad", "good 1", "good 2", "good 3"]
    assert len(warnings) == 2
    assert any("'two' is switched off" in line and "ValueError: disk full" in line for line in warnings)


def test_a_plugin_that_comes_later_gets_the_configuration_too() -> None:
    got: list[tuple[str, Any]] = []
    plugins = make(rlcore_configure=lambda config: got.append(("early", config)))
    plugins.configure("the config")  # type: ignore[arg-type]
    add(plugins, "late", rlcore_configure=lambda config: got.append(("late", config)))
    assert got == [("early", "the config"), ("late", "the config")]


def test_a_plugin_may_refuse_a_configuration() -> None:
    def refuse(config: Any) -> None:
        raise ConfigError("not both")

    with pytest.raises(ConfigError, match="not both"):
        make(rlcore_configure=refuse).configure("c")  # type: ignore[arg-type]

    def bug(config: Any) -> None:
        raise KeyError("x")

    with pytest.raises(PluginError, match="plugin one failed in rlcore_configure: KeyError: 'x'"):
        make(rlcore_configure=bug).configure("c")  # type: ignore[arg-type]


def test_the_first_answer_selects_the_recipe() -> None:
    plugins = make(rlcore_select_recipe=lambda model, hardware: f"{model} on {hardware}")
    add(plugins, "unsure", rlcore_select_recipe=lambda model: None)
    assert plugins.select_recipe("glm", "gb300") == "glm on gb300"
    assert Plugins().select_recipe("glm", "gb300") is None


def test_preflight_collects_the_problems_of_all_plugins() -> None:
    problem = Problem("disk", "full", "delete something")
    plugins = make(rlcore_preflight=lambda config: [problem])
    add(plugins, "content", rlcore_preflight=lambda config: None)
    assert plugins.preflight("c") == [problem]  # type: ignore[arg-type]


def test_a_plugin_whose_commands_fail_is_left_out() -> None:
    added: list[str] = []

    def bad(group: Any) -> None:
        raise ImportError("no typer")

    plugins = make(rlcore_add_commands=lambda group: group.append("good"))
    warnings: list[str] = []
    plugins.warn = warnings.append
    add(plugins, "two", rlcore_add_commands=bad)
    plugins.add_commands(added)  # type: ignore[arg-type]
    assert added == ["good"]
    assert warnings == ["the commands of plugin 'two' are missing: ImportError: no typer"]


def test_a_failed_registration_leaves_nothing_behind() -> None:
    plugins = Plugins()
    with pytest.raises(PluginError, match="plugin bad is broken"):
        add(
            plugins,
            "bad",
            rlcore_register_losses=lambda register: register("x", "a:B"),
            rlcore_register_graders=lambda register: register("y", "no target"),
        )
    assert plugins.offers() == []
    assert not plugins._by_name
    assert [p.status for p in plugins.all] == ["broken"]
    plugins.notify("rlcore_step_finished", step=1, metrics={})
    assert not any(caller.get_hookimpls() for caller in vars(plugins.hook).values())
