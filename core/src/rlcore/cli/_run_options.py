"""The options of every command that works on a run's configuration: recipe, ``--config``, ``--set``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from rlcore.cli import Globals
from rlcore.errors import ConfigError, RlcoreError
from rlcore.plugins import nearest
from rlcore.resolve import Layer, Resolved, file_layer, options_class, resolve, set_layer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["ConfigFile", "RecipeName", "Resolved", "RunCommand", "Sets", "resolve_run", "resolve_saved"]

RecipeName: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="[RECIPE]", help="Default: the recipe of --plugin, or recipe.name of the file.")
]
ConfigFile: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--config", "-c", metavar="FILE", help="A TOML file over the recipe's defaults.")
]
Sets: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="One value, over recipe and file.")
]


def resolve_run(
    context: typer.Context, recipe: str | None, config: Sequence[Path] | None, sets: Sequence[str] | None
) -> Resolved:
    """The configuration that a command line means, valid, and known to the plugins.

    Raises:
        ConfigError: it is wrong; says everything that is.
        PluginError: the recipe or something that it names is not there, or a plugin needs one of several recipes named.
    """
    known: Globals = context.obj
    layers = [*map(file_layer, config or ()), set_layer(sets or ())]
    if recipe is None and not any("recipe" in layer.values for layer in layers):
        recipe = _recipe_of_plugin(known)
        if recipe is None and not config:
            raise ConfigError(f"name a recipe, or a file with --config{nearest('', known.plugins.names('recipe'))}")
    resolved = resolve(known.plugins, layers, recipe)
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
    manifest = RunDirectory.reopen(run).manifest
    if manifest["plugins"]["hash"] != known.plugins.hash:
        print("rlcore: warning: the plugins are not those that this run began with", file=sys.stderr)
    layers = [Layer(f"{run}/manifest.json", manifest["config"]), set_layer(sets or ())]
    resolved = resolve(known.plugins, layers, complete=True)
    known.plugins.configure(resolved.config)
    return resolved


def _recipe_of_plugin(known: Globals) -> str | None:
    """The recipe that ``--plugin X`` means."""
    owners = [name for name in known.named if any(o.kind == "recipe" for o in known.plugins.find(name).offers)]
    if len(owners) > 1:
        raise ConfigError(f"plugins {' and '.join(owners)} both offer recipes: name the recipe")
    return known.plugins.default_recipe(owners[0]) if owners else None


class RunCommand(TyperCommand):
    """A command on a recipe: the recipe's own options may stand on its line (``--size tiny``: ``recipe.size=tiny``)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn the recipe's options into ``--set`` before the line is read."""
        fields = self._recipe_fields(ctx.obj, args)
        own = {option for parameter in self.params for option in parameter.opts}
        result: list[str] = []
        left = iter(args)
        for argument in left:
            option, equals, value = argument.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            if option in own or not option.startswith("--") or name not in fields:
                result.append(argument)
            elif equals:
                result += ["--set", f"recipe.{name}={value}"]
            elif fields[name].annotation is bool:
                result += ["--set", f"recipe.{name}=true"]
            else:
                result += ["--set", f"recipe.{name}={next(left, '')}"]
        return super().parse_args(ctx, result)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the recipe's options in ``--help``."""
        name, fields = self._found
        if fields:
            with formatter.section(f"Options of recipe {name}"):
                formatter.write_dl([(f"--{n.replace('_', '-')}", f.description or "") for n, f in fields.items()])
        super().format_epilog(ctx, formatter)

    _found: tuple[str | None, Mapping[str, FieldInfo]] = (None, {})

    def _recipe_fields(self, known: Globals, args: Sequence[str]) -> Mapping[str, FieldInfo]:
        """The options of the recipe that is named on the line or meant by ``--plugin``; nothing if that is unclear."""
        try:
            names = set(known.plugins.names("recipe"))
            name = next((a for a in args if a in names), None) or _recipe_of_plugin(known)
            fields = options_class(known.plugins, "recipe", name).model_fields if name else {}
        except RlcoreError:
            return {}  # the command itself says what is wrong
        self._found = (name, fields)
        return fields
