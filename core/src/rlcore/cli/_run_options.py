"""The options of every command that works on a run's configuration: recipe, ``--config``, ``--set``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from rlcore.cli import Globals
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, RlcoreError
from rlcore.plugins import nearest
from rlcore.resolve import Layer, Resolved, file_layer, options_class, resolve, set_layer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = [
    "ConfigOption",
    "RecipeArgument",
    "Resolved",
    "RunCommand",
    "SetOption",
    "recipe_of_plugin",
    "resolve_run",
    "resolve_saved",
]

RecipeArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="Default: of --plugin, of the file, or of model.path.")
]
ConfigOption: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--config", "-c", metavar="FILE", help="A TOML file over the recipe's defaults.")
]
SetOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="One value, over recipe and file.")
]


def resolve_run(
    context: typer.Context,
    recipe: str | None,
    config: Sequence[Path] | None,
    sets: Sequence[str] | None,
    *,
    as_a_whole: bool = True,
) -> Resolved:
    """The configuration that a command line means, valid, and known to the plugins.

    ``as_a_whole=False``: the plugins do not see it, so none refuses a combination (a plan says itself what cannot run).

    Raises:
        ConfigError: it is wrong; says everything that is.
        PluginError: the recipe or something that it names is not there, or a plugin needs one of several recipes named.
    """
    known: Globals = context.obj
    layers = [*map(file_layer, config or ()), set_layer(sets or ())]
    if recipe is None and not any(layer.get("recipe", "name") for layer in layers):
        recipe = recipe_of_plugin(known)
        selected = _recipe_of_model(known, layers) if recipe is None else None
        if selected is not None:
            layers.append(selected)
        elif recipe is None and not config:
            raise ConfigError(f"name a recipe, or a file with --config{nearest('', known.plugins.names('recipe'))}")
    resolved = resolve(known.plugins, layers, recipe)
    if as_a_whole:
        known.plugins.configure(resolved.config)
    return resolved


def resolve_saved(context: typer.Context, run: Path, sets: Sequence[str] | None) -> Resolved:
    """The configuration of a run directory, as it was, with ``--set`` over it.

    Raises:
        ConfigError: it is no run directory, or the configuration is wrong.
        PluginError: a plugin that the run used is not there.
    """
    from rlcore.record.directory import RunDirectory

    known: Globals = context.obj
    manifest = RunDirectory.manifest_of(run)
    if manifest["plugins"]["hash"] != known.plugins.hash:
        print("rlcore: warning: the plugins are not those that this run began with", file=sys.stderr)
    layers = [Layer(f"{run}/manifest.json", manifest["config"]), set_layer(sets or ())]
    resolved = resolve(known.plugins, layers, complete=True)
    known.plugins.configure(resolved.config)
    return resolved


def recipe_of_plugin(known: Globals) -> str | None:
    """The recipe that ``--plugin X`` means."""
    owners = [name for name in known.named if any(o.kind == "recipe" for o in known.plugins.find(name).offers)]
    if len(owners) > 1:
        raise ConfigError(f"plugins {' and '.join(owners)} both offer recipes: name the recipe")
    return known.plugins.default_recipe(owners[0]) if owners else None


def _recipe_of_model(known: Globals, layers: Sequence[Layer]) -> Layer | None:
    """The recipe that a plugin knows for ``model.path``, asked for where the layers alone are no whole run."""
    model = next((path for layer in reversed(layers) if (path := layer.get("model", "path"))), None)
    given = {name for layer in layers for name in layer.values}
    if model is None or all(name in given for name, field in RunConfig.model_fields.items() if field.is_required()):
        return None
    recipe = known.plugins.select_recipe(str(model), _hardware())
    if recipe is None:
        return None
    print(f"rlcore: recipe {recipe}, for the model {model}", file=sys.stderr)
    return Layer("rlcore_select_recipe", {"recipe": {"name": recipe}})


def _hardware() -> str:
    """``cpu``, or what the driver calls this machine's first GPU, in lower case."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text("utf-8", "replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip().lower()
    return "cpu"


class RunCommand(TyperCommand):
    """A command on a recipe: the recipe's own options may stand on its line (``--size tiny``: ``recipe.size=tiny``)."""

    recipe: str | None = None
    fields: Mapping[str, FieldInfo] = {}

    @property
    def recipe_options(self) -> list[str]:
        """The recipe's options as one writes them."""
        return [f"--{name.replace('_', '-')}" for name in self.fields]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn the recipe's options into ``--set`` before the line is read."""
        self._find_recipe(ctx.obj, args)
        own = {option for parameter in self.params for option in parameter.opts}
        result: list[str] = []
        left = iter(args)
        for argument in left:
            option, equals, value = argument.partition("=")
            if option in own or option.replace("_", "-") not in self.recipe_options:
                result.append(argument)
                continue
            name = option[2:].replace("-", "_")
            if not equals:
                value = "true" if self.fields[name].annotation is bool else next(left, "")
            result += ["--set", f"recipe.{name}={value}"]
        return super().parse_args(ctx, result)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the recipe's options in ``--help``."""
        if self.fields:
            with formatter.section(f"Options of recipe {self.recipe}"):
                meanings = [field.description or "" for field in self.fields.values()]
                formatter.write_dl(list(zip(self.recipe_options, meanings, strict=True)))
        super().format_epilog(ctx, formatter)

    def _find_recipe(self, known: Globals, args: Sequence[str]) -> None:
        """The recipe that is named on the line or meant by ``--plugin``; the command itself says what is wrong with it."""
        names = set(known.plugins.names("recipe"))
        with suppress(RlcoreError):
            self.recipe = next((a for a in args if a in names), None) or recipe_of_plugin(known)
            if self.recipe:
                self.fields = options_class(known.plugins, "recipe", self.recipe).model_fields
