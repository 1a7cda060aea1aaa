"""The ``rlcore`` command: the table of commands, options that hold everywhere, one readable line for every error."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from rlcore import __version__
from rlcore.errors import ConfigError, RlcoreError

if TYPE_CHECKING:
    from rlcore.plugins import Plugins

__all__ = ["COMMANDS", "Globals", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("rlcore.cli.train:train", "Train a model as a recipe says."),
    "eval": ("rlcore.cli.eval:evaluate", "Measure a policy on tasks."),
    "plan": ("rlcore.cli.plan:plan", "Say what a model needs on given hardware, from its shapes."),
    "export": ("rlcore.cli.export:export", "Write a run's weights as a Hugging Face model."),
    "config": ("rlcore.cli.config:app", "Show a run's configuration and what can be configured."),
    "plugins": ("rlcore.cli.plugins:app", "List, check and create plugins."),
    "check": ("rlcore.cli.check:app", "Check that a backend works here."),
    "sandboxes": ("rlcore.cli.sandboxes:app", "List and sweep sandboxes."),
}
"""The core's own commands: where each one is, and its line in ``rlcore --help``.

A target is a function (one command; its parameters are declared as typer wants them; with one called ``recipe`` it takes
the recipe's own options too) or a ``typer.Typer`` made by :func:`rlcore.cli.app.command_group` (a command with
subcommands). It is imported when the command is used, not for ``--help``; plugins add theirs with
``group.lazy(name, target, help)`` in ``rlcore_add_commands``. A command gets the plugins of the process as
``context.obj.plugins`` (:class:`Globals`) and may return its exit status.
"""


@dataclass(slots=True)
class Globals:
    """What every command finds in ``context.obj``.

    Attributes:
        plugins: the plugins of this process.
        named: plugins that ``--plugin`` asked for, in order.
    """

    plugins: Plugins
    named: tuple[str, ...] = ()


_EARLY_OPTIONS = ("--plugin", "-p", "--no-plugin", "--traceback")


@dataclass(slots=True)
class _Early:
    """The options that are read before any other, wherever they stand on the line."""

    plugins: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    traceback: bool = False
    rest: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit: 0, 1 (the run failed), 2 (the user's mistake), 130 (interrupted)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"rlcore {__version__}")
        sys.exit(0)
    early = _Early(traceback="--traceback" in arguments)
    usual, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        early = _read_early(arguments)
        sys.exit(_run(early))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on: no error at exit either
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said in one line
        if early.traceback:
            traceback.print_exception(error)
        status, message = _explain(error)
        print(message, file=sys.stderr)
        sys.exit(status)
    finally:
        warnings.formatwarning = usual


def _run(early: _Early) -> int:
    from rlcore.cli.app import build
    from rlcore.plugins import load_plugins

    plugins = load_plugins(early.plugins, blocked=early.blocked)
    command = build(plugins)
    status = command.main(
        early.rest, prog_name="rlcore", standalone_mode=False, obj=Globals(plugins, tuple(early.plugins))
    )
    return status if isinstance(status, int) else 0


def _read_early(arguments: Sequence[str]) -> _Early:
    early = _Early()
    lists = {"--plugin": early.plugins, "-p": early.plugins, "--no-plugin": early.blocked}
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if argument == "--":
            early.rest += [argument, *left]
        elif argument == "--traceback":
            early.traceback = True
        elif name in lists:
            lists[name].append(value if equals else _value_of(name, left))
        elif argument.startswith("-p"):
            early.plugins.append(argument[2:])
        else:
            early.rest.append(argument)
    return early


def _value_of(option: str, left: Iterator[str]) -> str:
    value = next(left, "")
    if not value or value.startswith("-"):
        raise ConfigError(f"{option} needs the name of a plugin behind it")
    return value


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit status and message of an error; of a group of errors, the one that was raised on purpose."""
    leaves = list(_leaves(error))
    first = next((leaf for leaf in leaves if isinstance(leaf, RlcoreError)), leaves[0])
    if isinstance(first, RlcoreError):
        return first.exit_code, f"rlcore: error: {first}"
    if hasattr(first, "format_message"):  # click's errors, wherever this typer keeps its copy of click
        return 2, _explain_usage(first)
    if isinstance(first, OSError):
        return 1, f"rlcore: error: {first}"
    return 1, f"rlcore: error: {type(first).__name__}: {first} (this should not happen; --traceback shows where)"


def _explain_usage(error: Any) -> str:
    from rlcore.plugins import nearest

    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    message = error.message if hasattr(error, "option_name") else error.format_message()
    context = getattr(error, "ctx", None)
    if context is None:
        return f"rlcore: error: {message}"
    if hasattr(error, "option_name"):
        options = [*_EARLY_OPTIONS, "--help", *(option for p in context.command.params for option in p.opts)]
        options += getattr(context.command, "recipe_options", ())
        message += nearest(error.option_name, [option for option in options if option.startswith("--")])
    return f"rlcore: error: {message}\ntry '{context.command_path} --help'"


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"rlcore: warning: {message}\n"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
