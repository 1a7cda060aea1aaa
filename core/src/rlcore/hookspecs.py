"""Every extension point of rlcore, on one page.

A plugin is a module behind an entry point of the group ``rlcore``::

    [project.entry-points.rlcore]
    docker = "rlcore_docker.plugin"

    from rlcore import hookimpl

    @hookimpl
    def rlcore_register_sandboxes(register):
        register("docker", "rlcore_docker.backend:DockerBackend")

The ``rlcore_register_*`` hooks collect names: ``register(name, target)`` takes a lazy ``"package.module:Attr"`` string,
so the module that holds them imports nothing heavy. Hooks offer and observe; they never compute. All are synchronous and
called outside hot loops; an observer that raises is switched off with one warning and never harms the run. What each
offered class must be stands in ``protocols.py``; how this page may change, in ``CONTRIBUTING.md`` (``HOOK_API``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from rlcore.cli.app import CommandGroup
    from rlcore.config import RunConfig
    from rlcore.types import Group, Problem, Trajectory

HOOK_API = 1
"""Version of this page. A plugin may require it as ``RLCORE_HOOK_API = 1`` at the top of its module."""

hookspec = pluggy.HookspecMarker("rlcore")
hookimpl = pluggy.HookimplMarker("rlcore")


class Register(Protocol):
    """The callback of the collecting hooks."""

    def __call__(self, name: str, target: str | type, *, needs: str = "") -> None:
        """Offer ``target`` (lazily as ``"package.module:Attr"``, or the class itself) under ``name``.

        ``needs`` names the distribution that really offers ``name``. As long as it is not installed, ``target`` types the
        options (so a recipe that uses the name can be shown, checked and planned), a preflight says what to install, and
        building it raises ``PluginError``; once it is installed, this offer gives way without a conflict.
        """


# --- offers: what a configuration can name ----------------------------------------------------------------------------


@hookspec
def rlcore_register_losses(register: Register) -> None:
    """Policy losses (``loss.name``): :class:`rlcore.protocols.Loss`."""


@hookspec
def rlcore_register_corrections(register: Register) -> None:
    """Corrections of the gap between trainer and engine log-probs (``correction.name``): every TIS variant."""


@hookspec
def rlcore_register_advantages(register: Register) -> None:
    """Advantage estimators (``advantage.name``)."""


@hookspec
def rlcore_register_aggregations(register: Register) -> None:
    """Rules from masks to token weights and the denominator (``aggregation.name``)."""


@hookspec
def rlcore_register_policy_clients(register: Register) -> None:
    """Clients that ask a model (``policy.name``)."""


@hookspec
def rlcore_register_engines(register: Register) -> None:
    """Engines that serve the model which is trained (``engine.name``)."""


@hookspec
def rlcore_register_sandboxes(register: Register) -> None:
    """Sandbox backends (``sandbox.name``)."""


@hookspec
def rlcore_register_agent_loops(register: Register) -> None:
    """Agent loops (``agent.name``)."""


@hookspec
def rlcore_register_graders(register: Register) -> None:
    """Graders (``grader.name``)."""


@hookspec
def rlcore_register_tasksets(register: Register) -> None:
    """Task sets (``taskset.name``, ``eval.taskset.name``)."""


@hookspec
def rlcore_register_trainers(register: Register) -> None:
    """Trainers (``trainer.name``)."""


@hookspec
def rlcore_register_launchers(register: Register) -> None:
    """Launchers (``launcher.name``)."""


@hookspec
def rlcore_register_recipes(register: Register) -> None:
    """Recipes (``rlcore train RECIPE``). The one that is named like its plugin is the plugin's default."""


@hookspec
def rlcore_register_trackers(register: Register) -> None:
    """Trackers (``trackers = [{name = …}]``)."""


# --- the command line and the configuration ---------------------------------------------------------------------------


@hookspec
def rlcore_add_commands(group: CommandGroup) -> None:
    """Add commands: ``group.lazy("serve", "rlcore_engine.cli:serve", "Serve a model over HTTP.")``.

    Called at every start; the target is imported when the command is used (see ``rlcore.cli.COMMANDS``).
    """


@hookspec(historic=True)
def rlcore_configure(config: RunConfig) -> None:
    """The configuration is resolved and valid; plugins that are registered later get it too. Raise ``ConfigError``
    to refuse a combination."""


@hookspec(firstresult=True)
def rlcore_select_recipe(model: str, hardware: str) -> str | None:
    """The name of a recipe for a model, or ``None``; the first answer wins.

    Called for a command on a run that has ``model.path`` but no recipe and not every section. ``model``: that path (a
    folder with ``config.json``, if it is there); ``hardware``: ``cpu``, or what the driver calls this machine's first
    GPU, in lower case (``nvidia h200``).
    """


@hookspec
def rlcore_preflight(config: RunConfig) -> Iterable[Problem] | None:
    """Problems that would make the run fail, each with its remedy; bounded in time; never touches a GPU."""


# --- observers: what happens in a run ---------------------------------------------------------------------------------


@hookspec
def rlcore_run_started(run_id: str, config: RunConfig) -> None:
    """The run directory exists and the engine serves; nothing was sampled yet."""


@hookspec
def rlcore_trajectory_finished(trajectory: Trajectory) -> None:
    """An attempt ended, with or without a verdict."""


@hookspec
def rlcore_group_finished(group: Group) -> None:
    """All attempts of a group ended."""


@hookspec
def rlcore_step_finished(step: int, metrics: Mapping[str, Any]) -> None:
    """An optimizer step was taken (or skipped: ``metrics["skipped"]``) and its metrics are written."""


@hookspec
def rlcore_weights_published(version: int) -> None:
    """The engine serves this version."""


@hookspec
def rlcore_alarm_raised(alarm: Mapping[str, Any]) -> None:
    """Something is wrong with the run; the same mapping is a line of ``alarms.jsonl``."""


@hookspec
def rlcore_run_finished(run_id: str, summary: Mapping[str, Any]) -> None:
    """The run ended, however it ended (``summary["end"]``)."""
