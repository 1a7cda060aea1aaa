"""What is known of a plugin and of what it offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.plugins._names import origin

KINDS: Mapping[str, str] = {
    "recipe": "rlcore_register_recipes",
    "taskset": "rlcore_register_tasksets",
    "agent": "rlcore_register_agent_loops",
    "grader": "rlcore_register_graders",
    "sandbox": "rlcore_register_sandboxes",
    "policy": "rlcore_register_policy_clients",
    "engine": "rlcore_register_engines",
    "trainer": "rlcore_register_trainers",
    "advantage": "rlcore_register_advantages",
    "correction": "rlcore_register_corrections",
    "loss": "rlcore_register_losses",
    "aggregation": "rlcore_register_aggregations",
    "launcher": "rlcore_register_launchers",
    "tracker": "rlcore_register_trackers",
}
"""What can be offered, in the words of the configuration, and the hook that collects it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One name that a plugin offers.

    Attributes:
        kind: a key of :data:`KINDS`.
        name: as the plugin spells it.
        target: ``"package.module:Attr"``, or the class itself.
        plugin: name of the entry point, or the module's path.
        distribution: what pip installed it as; empty for a module that was named by its path.
        version: of the distribution; empty where there is none.
        needs: the distribution that really offers this name. Until it is installed, this class types the options, and
            building it says what is missing; then it gives way.
    """

    kind: str
    name: str
    target: str | type
    plugin: str = ""
    distribution: str = ""
    version: str = ""
    needs: str = ""

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.kind} {self.name!r} of {origin(self.plugin, self.distribution, self.version)}"

    @property
    def path(self) -> str:
        """The target as text."""
        return self.target if isinstance(self.target, str) else f"{self.target.__module__}:{self.target.__qualname__}"


@dataclass(slots=True, eq=False)
class Plugin:
    """One plugin, whatever became of it.

    Attributes:
        name: of the entry point, or the module's path.
        module: what it points to (``package.module`` or ``package.module:attr``).
        distribution: what pip installed it as; empty for a module that was named by its path.
        version: of the distribution.
        status: ``ok``, ``broken`` (see ``reason``) or ``off`` (deselected: never imported).
        reason: why it is not ``ok``, in one line.
        offers: what it offers, in its own order.
        hooks: the hooks that it implements.
    """

    name: str
    module: str
    distribution: str = ""
    version: str = ""
    status: Literal["ok", "broken", "off"] = "ok"
    reason: str = ""
    offers: tuple[Offer, ...] = ()
    hooks: tuple[str, ...] = ()
    cause: BaseException | None = None

    def __str__(self) -> str:
        """As messages name it."""
        return origin(self.name, self.distribution, self.version)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json`` and the manifest."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "status": self.status,
            "reason": self.reason,
            "offers": [
                {"kind": o.kind, "name": o.name, "target": o.path} | ({"needs": o.needs} if o.needs else {})
                for o in self.offers
            ],
            "hooks": list(self.hooks),
        }
