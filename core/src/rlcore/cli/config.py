"""``rlcore config``: what a run would use, where each value is from, and what can be set."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from rlcore.cli import Globals
from rlcore.cli._run_options import ConfigOption, RecipeArgument, RunCommand, SetOption, resolve_run
from rlcore.cli.app import command_group
from rlcore.config import RunConfig
from rlcore.errors import PluginError
from rlcore.plugins import KINDS, Plugins
from rlcore.resolve import offered_sections, options_class

__all__ = ["app", "leaves", "origin_of", "toml"]

app = command_group("Show a run's configuration and what can be configured.")

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command("show", cls=RunCommand)
def show(
    context: typer.Context,
    recipe: RecipeArgument = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: AsJson = False,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value is from.")] = False,
) -> None:
    """The complete configuration of a run, as TOML that --config takes."""
    resolved = resolve_run(context, recipe, config, sets)
    values = resolved.config.model_dump(mode="json")
    if as_json:
        origins = {key: origin_of(key, resolved.origins) for key, _ in leaves(values)}
        print(json.dumps({"config": values, "origin": origins} if origin else values, indent=2, ensure_ascii=False))
        return
    for key, value in leaves(values):
        line = f"{key} = {toml(value)}" if value is not None else f"# {key} is not set"
        print(f"{line}  # {origin_of(key, resolved.origins)}" if origin else line)


@app.command("schema", cls=RunCommand)
def schema(
    context: typer.Context,
    recipe: RecipeArgument = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Every key with its type, default and meaning; with a recipe, the options of what that one uses."""
    known: Globals = context.obj
    offers: dict[str, dict[str, Any]] = {}
    if recipe or config or known.named:
        values = resolve_run(context, recipe, config, sets).config.model_dump()
        for path, kind in offered_sections().items():
            section: Any = values
            for part in path:
                section = section and section.get(part)
            if section:
                offers.setdefault(kind, {})[section["name"]] = _schema_of(known.plugins, kind, section["name"])
    else:
        for kind in KINDS:
            offers[kind] = {name: _schema_of(known.plugins, kind, name) for name in known.plugins.names(kind)}
    core = RunConfig.model_json_schema()
    if as_json:
        print(json.dumps({"run": core, "offers": offers}, indent=2, ensure_ascii=False))
        return
    for name, property_ in core["properties"].items():
        inner = _follow(property_, core)
        if "properties" in inner and name not in KINDS:
            _print_properties(f"{name}.", inner, core)
    for kind, named in offers.items():
        section_name = "trackers[]" if kind == "tracker" else kind
        print(f"{section_name}.name\n    one of {', '.join(named) or 'nothing (no plugin offers one)'}")
        for name, described in named.items():
            if "error" in described:
                print(f"{section_name} ({name})\n    {described['error']}")
            _print_properties(f"{section_name}.", described, described, f" ({name})")


def _schema_of(plugins: Plugins, kind: str, name: str) -> dict[str, Any]:
    try:
        return options_class(plugins, kind, name).model_json_schema()
    except PluginError as error:
        return {"error": str(error)}


def _follow(property_: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in property_:
        found: Mapping[str, Any] = root["$defs"][property_["$ref"].rpartition("/")[2]]
        return found
    return property_


def _print_properties(prefix: str, described: Mapping[str, Any], root: Mapping[str, Any], of: str = "") -> None:
    for name, property_ in described.get("properties", {}).items():
        print(f"{prefix}{name}{of}\n    {_describe(property_, root)}")


def _describe(property_: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    default = f", default {json.dumps(property_['default'])}" if "default" in property_ else ""
    text = property_.get("description", "")
    return f"{_type(property_, root)}{default}{': ' + text if text else ''}"


def _type(property_: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    inner = _follow(property_, root)
    if "anyOf" in inner:
        return " or ".join(_type(arm, root) for arm in inner["anyOf"])
    if "enum" in inner or "const" in inner:
        return " or ".join(json.dumps(value) for value in inner.get("enum", [inner.get("const")]))
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = "".join(f" {sign} {inner[key]}" for key, sign in bounds.items() if key in inner)
    if "properties" in inner:
        return "table of " + ", ".join(inner["properties"])
    return f"{inner.get('type', 'anything')}{limits}"


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """The source of a key, or of the whole table or list around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return "default"


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    for name, value in values.items():
        key = prefix + (name if name.replace("-", "_").isidentifier() and name.isascii() else json.dumps(name))
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {toml(inner)}" for key, inner in leaves(value) if inner is not None)
        return f"{{{inside}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
