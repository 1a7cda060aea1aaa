"""``rlcore losses``: what an objective can be made of, and what one piece does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rlcore.cli.app import LazyGroup
from rlcore.plugins import Plugins
from rlcore.resolve import build_options, set_layer

from rlcore_losses.catalog import KINDS, Entry, describe, find, listed
from rlcore_losses.curves import curves, draw, plot_text

__all__ = ["app"]

app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, add_completion=False)

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.callback(invoke_without_command=True)
def _default(context: typer.Context, as_json: AsJson = False) -> None:
    """List corrections, losses, advantages and aggregations, or show one."""
    if context.invoked_subcommand is None:
        _list(context.obj.plugins, as_json)


@app.command("list")
def list_(context: typer.Context, as_json: AsJson = False) -> None:
    """Every correction, loss, advantage estimator and aggregation that any plugin offers."""
    _list(context.obj.plugins, as_json)


@app.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="As the configuration calls it.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="An option for the plot; may be repeated."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this file (PNG, SVG, PDF).")] = None,
    as_json: AsJson = False,
) -> None:
    """Formula, log-prob families, options, and weight or gradient against the log-ratio."""
    plugins: Plugins = context.obj.plugins
    shown = []
    for kind, cls in find(plugins, name).items():
        offer = plugins.offer(kind, name)
        entry = describe(kind, offer.name, offer.distribution or offer.plugin, cls)
        piece = _built(plugins, entry, cls, settings or ())
        shown.append((entry, curves(kind, piece) if piece is not None else []))
    if plot is not None:
        entry, lines = next(((e, c) for e, c in shown if c), shown[0])
        draw(lines, f"{entry.kind} {entry.name}", plot)
    if as_json:
        found = [
            {**entry.to_dict(), "curves": [{"label": c.label, "x": c.x, "y": c.y} for c in lines]}
            for entry, lines in shown
        ]
        print(json.dumps(found, indent=2))
        return
    for number, (entry, lines) in enumerate(shown):
        print(("\n" if number else "") + _text(entry))
        if lines:
            print("\n" + plot_text(lines))
    if plot is not None:
        print(f"\nwritten to {plot}")


def _list(plugins: Plugins, as_json: bool) -> None:
    entries = listed(plugins)
    if as_json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for kind in KINDS:
        print(f"{kind}.name =")
        for entry in entries:
            if entry.kind == kind:
                origin = "" if entry.distribution == "rlcore-losses" else f"  [{entry.distribution}]"
                print(f"  {entry.name:<{width}}  {entry.summary}{origin}")


def _text(entry: Entry) -> str:
    lines = [f"{entry.kind} {entry.name}  ({entry.distribution})", entry.summary, ""]
    for title, value in (
        ("formula", entry.formula),
        ("reads", entry.reads),
        ("denominator", entry.denominator),
        ("unit", entry.unit),
        ("source", entry.source),
    ):
        if value:
            lines.append(f"{title:<12} {value}")
    lines += ["", "options"] if entry.options else []
    width = max((len(option.name) for option in entry.options), default=0)
    shown = max((len(option.default) for option in entry.options), default=0)
    lines += [f"  {o.name:<{width}}  {o.default:<{shown}}  {o.description}" for o in entry.options]
    return "\n".join(lines)


def _built(plugins: Plugins, entry: Entry, cls: Any, settings: Sequence[str]) -> Any:
    """An instance with these options, or nothing where required ones are missing and none was given."""
    if not settings and any(option.default == "required" for option in entry.options):
        return None
    return cls(build_options(plugins, [set_layer(settings, entry.kind)], {entry.kind: cls.Config})[entry.kind])
