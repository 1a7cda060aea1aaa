"""``rlcore plugins``: what is installed, what it offers, whether it keeps the rules, and a skeleton for a new one."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcore.cli.app import LazyGroup
from rlcore.errors import PluginError
from rlcore.plugins import KINDS, Offer, Plugin, Plugins

__all__ = ["app"]

app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, add_completion=False)

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.callback(invoke_without_command=True)
def _default(context: typer.Context, as_json: AsJson = False) -> None:
    """List, check and create plugins."""
    if context.invoked_subcommand is None:
        _list(context.obj.plugins, as_json)


@app.command("list")
def list_(context: typer.Context, as_json: AsJson = False) -> None:
    """Every plugin with what it offers; broken ones with the reason."""
    _list(context.obj.plugins, as_json)


@app.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A plugin, or distribution:plugin.")],
    as_json: AsJson = False,
) -> None:
    """One plugin: what it is, what it offers with which options, why it is broken."""
    plugins: Plugins = context.obj.plugins
    plugin = plugins.find(name)
    if as_json:
        print(json.dumps(_as_dict(plugins, plugin), indent=2))
        return
    print(f"{plugin}\nmodule  {plugin.module}\nstatus  {_status(plugin)}")
    if plugin.cause is not None:
        print("".join(traceback.format_exception(plugin.cause)))
    for offer in plugin.offers:
        print(f"\n{offer.kind} {offer.name}  ({offer.path}){_remark(plugins, offer)}")
        for line in _describe(plugins, offer):
            print(f"    {line}")
    if hooks := [hook for hook in plugin.hooks if hook not in KINDS.values()]:
        print(f"\nhooks  {', '.join(hooks)}")


@app.command("check")
def check(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check that plugins keep the rules: options, methods, imports. Exit status 1 if one does not."""
    from rlcore.testing.plugin import heavy_imports, offer_problems

    plugins: Plugins = context.obj.plugins
    chosen = [plugins.find(name) for name in names] if names else [p for p in plugins.all if p.status != "off"]
    problems: dict[str, list[str]] = {}
    for plugin in chosen:
        found = [] if plugin.status == "ok" else [f"plugin {plugin} is {_status(plugin)}"]
        for offer in plugin.offers:
            found += offer_problems(plugins, offer)
            if also := _also(plugins, offer):
                found.append(f"{offer}{also}")
        found += heavy_imports(plugin) if plugin.status == "ok" else []
        problems[str(plugin)] = found
    if as_json:
        print(json.dumps(problems, indent=2))
    else:
        for name, found in problems.items():
            print(f"{name}: {'ok' if not found else f'{len(found)} problems'}")
            for line in found:
                print(f"    {line}")
    return 1 if any(problems.values()) else 0


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the plugin, such as my-sandbox.")],
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help=f"One of {', '.join(KINDS)}.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to write it; default: a folder NAME here.")
    ] = None,
) -> None:
    """Write a new plugin: a complete distribution with its entry point, one class and a test that passes."""
    from rlcore.testing.skeleton import write_skeleton

    written = write_skeleton(name, kind, directory or Path(name))
    print(f"wrote {written.directory}: pip install -e {written.directory}, then pytest {written.directory}")
    print(f"use it with --set {kind}.name={written.offer}")


def _list(plugins: Plugins, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_as_dict(plugins, plugin) for plugin in plugins.all], indent=2))
        return
    width = max((len(plugin.name) for plugin in plugins.all), default=0)
    for plugin in plugins.all:
        origin = f"{plugin.distribution} {plugin.version}".strip() or plugin.module
        print(f"{plugin.name:<{width}}  {origin}  {_status(plugin)}")
        for kind in KINDS:
            if names := [f"{offer.name}{_remark(plugins, offer)}" for offer in plugin.offers if offer.kind == kind]:
                print(f"{'':<{width}}    {kind}: {', '.join(names)}")


def _status(plugin: Plugin) -> str:
    return plugin.status if plugin.status == "ok" else f"{plugin.status}: {plugin.reason}"


def _remark(plugins: Plugins, offer: Offer) -> str:
    """What is to be known of an offer beside its name."""
    return f" (needs {offer.needs})" if offer.needs else _also(plugins, offer)


def _also(plugins: Plugins, offer: Offer) -> str:
    """A remark on an offer whose name another plugin claims too."""
    others = [other.distribution or other.plugin for other in _rivals(plugins, offer) if other is not offer]
    own = f"{offer.distribution or offer.plugin}:{offer.name}"
    return f" (claimed by {' and '.join(others)} too: name it as {own})" if others else ""


def _rivals(plugins: Plugins, offer: Offer) -> Iterable[Offer]:
    return next((offers for offers in plugins.collisions() if offer in offers), ())


def _as_dict(plugins: Plugins, plugin: Plugin) -> dict[str, Any]:
    described = plugin.to_dict()
    described["collisions"] = [
        f"{offer.kind} {offer.name}{also}" for offer in plugin.offers if (also := _also(plugins, offer))
    ]
    return described


def _describe(plugins: Plugins, offer: Offer) -> Iterable[str]:
    """An offered class in lines: what it is, and its options."""
    from rlcore.resolve import options_class

    name = f"{offer.distribution or offer.plugin}:{offer.name}"
    try:
        loaded, config = plugins.load(offer.kind, name), options_class(plugins, offer.kind, name)
    except PluginError as error:
        yield str(error)
        return
    yield from (loaded.__doc__ or "").strip().splitlines()[:1]
    for key, field in config.model_fields.items():
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        yield f"{key}  {default}: {field.description or ''}"
