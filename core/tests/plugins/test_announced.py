"""An offer may be announced before the distribution that really offers it is installed."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field
from rlcore import hookimpl
from rlcore.errors import PluginError
from rlcore.plugins import Plugin, Plugins
from rlcore.resolve import options_class
from rlcore.testing.plugin import offer_problems


class Announced:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")
        lr: float = Field(1e-6, description="learning rate")

    def __init__(self, config: Config) -> None:
        raise PluginError("trainer 'big' is not installed: pip install rlcore-big")


class Real(Announced):
    pass


def plugins_with(*offers: tuple[type, str]) -> Plugins:
    plugins = Plugins()
    for number, (target, needs) in enumerate(offers):

        def offer(register: Any, target: type = target, needs: str = needs) -> None:
            register("big", target, needs=needs)

        scope: dict[str, Any] = {"offer": offer}
        exec("def rlcore_register_trainers(register): offer(register)", scope)
        module = SimpleNamespace(rlcore_register_trainers=hookimpl(scope["rlcore_register_trainers"]))
        plugins.register(Plugin(f"p{number}", "m", f"dist-{number}", "1"), module)
    return plugins


def test_it_types_the_options_and_says_what_is_missing_when_it_is_built() -> None:
    plugins = plugins_with((Announced, "rlcore-big"))
    config = options_class(plugins, "trainer", "big")
    assert config().lr == 1e-6  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="pip install rlcore-big"):
        plugins.load("trainer", "big")(config())


@pytest.mark.parametrize("order", [((Announced, "rlcore-big"), (Real, "")), ((Real, ""), (Announced, "rlcore-big"))])
def test_it_gives_way_to_the_real_one_without_a_conflict(order: tuple[tuple[type, str], ...]) -> None:
    plugins = plugins_with(*order)
    assert plugins.load("trainer", "big") is Real
    assert not plugins.collisions()


def test_two_announcements_are_no_conflict_and_two_real_ones_are() -> None:
    assert plugins_with((Announced, "rlcore-big"), (Announced, "rlcore-big")).offer("trainer", "big").needs
    with pytest.raises(PluginError, match="is offered by"):
        plugins_with((Real, ""), (Real, ""), (Announced, "x")).offer("trainer", "big")


def test_only_its_options_are_checked_and_the_listing_says_what_it_needs() -> None:
    plugins = plugins_with((Announced, "rlcore-big"))
    (plugin,) = plugins.all
    assert not list(offer_problems(plugins, plugin.offers[0]))
    assert plugin.to_dict()["offers"][0]["needs"] == "rlcore-big"
