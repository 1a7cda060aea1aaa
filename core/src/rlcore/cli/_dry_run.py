"""What ``rlcore train --dry-run`` shows: every value with its origin, and everything that would run, node by node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.cli.config import leaves, origin_of, toml
from rlcore.protocols import ClusterRecipe, ExplainedRecipe
from rlcore.quoting import quoted
from rlcore.resolve import Resolved
from rlcore.types import Cluster

__all__ = ["described", "print_dry_run"]


def described(resolved: Resolved) -> dict[str, Any]:
    """For ``--json``. Secrets are references: the configuration holds none, and environments name variables."""
    recipe = resolved.recipe
    reasons: Mapping[str, str] = recipe.reasons() if isinstance(recipe, ExplainedRecipe) else {}
    values = resolved.config.model_dump(mode="json")
    configuration = {
        key: {"value": value, "origin": origin_of(key, resolved.origins)}
        | ({"why": reasons[key]} if _holds(key, reasons, resolved) else {})
        for key, value in leaves(values)
    }
    cluster = recipe.cluster(resolved.config) if isinstance(recipe, ClusterRecipe) else None
    return {"recipe": resolved.name, "configuration": configuration, "cluster": _cluster(cluster)}


def print_dry_run(resolved: Resolved, as_json: bool) -> None:
    """Print it, for a person or a program."""
    found = described(resolved)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print(f"# recipe {found['recipe']}" if found["recipe"] else "# no recipe")
    for key, entry in found["configuration"].items():
        why = f": {entry['why']}" if "why" in entry else ""
        value = entry["value"]
        print(f"{key} = {toml(value)}  # {entry['origin']}{why}" if value is not None else f"# {key} is not set")
    cluster = found["cluster"]
    if cluster is None:
        print("\n# everything runs in one process, here")
        return
    print(f"\n# {cluster['nodes']} nodes of {cluster['gpus_per_node']} GPUs; ports of the head: {cluster['ports']}")
    for plan in cluster["plans"]:
        print(f"\n# nodes {_ranges(plan['nodes'])}: {plan['role']}")
        for name, value in plan["env"].items():
            print(f"export {name}={quoted([value])}")
        for command in plan["commands"]:
            print(quoted(command))
    for component, fields in cluster["settings"].items():
        print(f"\n# {component}")
        for name, value in fields.items():
            print(f"{name} = {json.dumps(value)}")


def _holds(key: str, reasons: Mapping[str, str], resolved: Resolved) -> bool:
    """A reason speaks of the recipe's value, not of another one in its place."""
    return key in reasons and origin_of(key, resolved.origins) == f"recipe {resolved.name}"


def _cluster(cluster: Cluster | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "ports": dict(cluster.ports),
        "driver": list(cluster.driver),
        "plans": [
            {
                "nodes": list(plan.nodes),
                "role": plan.role,
                "env": dict(plan.env),
                "commands": [list(command) for command in plan.commands],
            }
            for plan in cluster.plans
        ],
        "settings": {name: dict(fields) for name, fields in cluster.settings.items()},
    }


def _ranges(numbers: Sequence[int]) -> str:
    """``0, 2, 4`` or ``1-7``."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
