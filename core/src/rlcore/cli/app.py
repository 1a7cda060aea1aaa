"""The typer application: commands by name, imported when they are used. Plain text: no rich for ``--help``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlcore import __version__
from rlcore.cli import COMMANDS
from rlcore.errors import PluginError
from rlcore.plugins import nearest, reason

if TYPE_CHECKING:
    from rlcore.plugins import Plugins

__all__ = ["CommandGroup", "LazyGroup", "build", "command_group"]

EVERYWHERE = (
    "Everywhere on the line: --plugin/-p NAME, --no-plugin NAME (which plugins are loaded), "
    "--traceback (where an error comes from)."
)


class CommandGroup(typer.Typer):
    """What plugins get as ``group`` in ``rlcore_add_commands``."""

    def __init__(self) -> None:
        """An empty group."""
        super().__init__(cls=LazyGroup, rich_markup_mode=None, add_completion=False, no_args_is_help=True)
        self.commands: dict[str, tuple[str, str]] = {}

    def lazy(self, name: str, target: str, help: str) -> None:  # noqa: A002 - as typer calls it
        """Add a command that is imported when it is used.

        Args:
            name: the word on the command line.
            target: ``"package.module:function"`` or ``"package.module:app"`` (see :data:`rlcore.cli.COMMANDS`).
            help: its line in ``rlcore --help``.

        Raises:
            PluginError: the name is taken.
        """
        if name in self.commands:
            raise PluginError(f"command {name!r} is already there, from {self.commands[name][0]!r}")
        self.commands[name] = (target, help)


class LazyGroup(TyperGroup):
    """A group of which some commands are only names until they are used."""

    targets: Mapping[str, tuple[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """The table's names, then those of commands that are here already."""
        return [*self.targets, *(name for name in super().list_commands(ctx) if name not in self.targets)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now if it is from the table."""
        if cmd_name not in self.targets:
            return super().get_command(ctx, cmd_name)
        return _load(cmd_name, *self.targets[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As in click, with the nearest name in the error."""
        if args[0] not in (known := self.list_commands(ctx)) and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Names and lines, without importing anything and without cutting a line off."""
        own: Any = self.commands
        rows = [
            (name, self.targets[name][1] if name in self.targets else own[name].get_short_help_str(200))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command_group(help: str) -> typer.Typer:  # noqa: A002 - as typer calls it
    """A command with subcommands: what the target of a table entry may be."""
    group = typer.Typer(help=help, cls=LazyGroup, rich_markup_mode=None, add_completion=False, no_args_is_help=True)
    group.callback()(_nothing)
    return group


def build(plugins: Plugins) -> Any:
    """The whole command: the core's table and what the plugins add."""
    group = CommandGroup()
    group.callback(epilog=EVERYWHERE)(_root)
    for name, (target, line) in COMMANDS.items():
        group.lazy(name, target, line)
    plugins.add_commands(group)
    command: Any = typer.main.get_command(group)
    command.targets = group.commands
    return command


def _load(name: str, target: str, line: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(f"command {name!r}: cannot load {target!r}: {reason(error)}") from error
    if not isinstance(loaded, typer.Typer):
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(name, cls=_class_of(loaded), epilog=EVERYWHERE)(loaded)
        loaded = single
    command: Any = typer.main.get_command(loaded)
    command.name = name
    command.help = command.help or line
    return command


def _class_of(function: Any) -> type[TyperCommand]:
    """A command that takes a recipe takes the recipe's own options too."""
    if "recipe" not in inspect.signature(function).parameters:
        return TyperCommand
    from rlcore.cli._run_options import RunCommand

    return RunCommand


def _print_version(value: bool) -> None:
    if value:
        print(f"rlcore {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning."""


def _nothing() -> None:
    pass
