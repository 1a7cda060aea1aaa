"""What can be said about an offer without running it: its class, its ``Config``, its methods, what it imports."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore import protocols
from rlcore.errors import PluginError
from rlcore.plugins import Offer, Plugin, Plugins
from rlcore.resolve import options_class

__all__ = ["HEAVY", "PROTOCOLS", "heavy_imports", "offer_problems"]

PROTOCOLS: Mapping[str, type] = {
    "recipe": protocols.Recipe,
    "taskset": protocols.Taskset,
    "agent": protocols.AgentLoop,
    "grader": protocols.Grader,
    "sandbox": protocols.SandboxBackend,
    "policy": protocols.PolicyClient,
    "engine": protocols.Engine,
    "trainer": protocols.Trainer,
    "advantage": protocols.AdvantageEstimator,
    "correction": protocols.Correction,
    "loss": protocols.Loss,
    "aggregation": protocols.Aggregation,
    "launcher": protocols.Launcher,
    "tracker": protocols.Tracker,
}
"""What a class of each kind must be."""

HEAVY = (
    "torch",
    "transformers",
    "ray",
    "openai",
    "numpy",
    "pyarrow",
    "jax",
    "tensorflow",
    "fastapi",
    "docker",
    "modal",
)
"""What neither a plugin module nor the module of an offered class may import at its top."""

_PROBE = """
import importlib, json, sys
heavy, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for module in modules:
    before = set(sys.modules)
    importlib.import_module(module)
    found[module] = [name for name in heavy if name in sys.modules and name not in before]
print("\\n" + json.dumps(found))
"""


def offer_problems(plugins: Plugins, offer: Offer) -> Iterator[str]:
    """What is wrong with one offered class, one line each; nothing is instantiated."""
    name = f"{offer.distribution or offer.plugin}:{offer.name}" if offer.plugin else offer.name
    try:
        loaded = plugins.load(offer.kind, name)
        config = options_class(plugins, offer.kind, name)
    except PluginError as error:
        yield str(error)
        return
    if config.model_config.get("extra") != "forbid":
        yield f"{offer}: its Config takes unknown keys: model_config = ConfigDict(extra='forbid')"
    for key, field in config.model_fields.items():
        if not field.description:
            yield f"{offer}: option {key!r} has no description"
    for method, wanted in _methods(PROTOCOLS[offer.kind]) if not offer.needs else ():
        found = getattr(loaded, method, None)
        if found is None:
            yield f"{offer}: {loaded.__name__} has no {method}(): see rlcore.protocols.{PROTOCOLS[offer.kind].__name__}"
        elif inspect.iscoroutinefunction(wanted) != inspect.iscoroutinefunction(found) and callable(wanted):
            word = "must" if inspect.iscoroutinefunction(wanted) else "must not"
            yield f"{offer}: {loaded.__name__}.{method}() {word} be async"


def heavy_imports(plugin: Plugin) -> Iterator[str]:
    """What a plugin imports too early, found in a process of its own, one line each."""
    modules = [plugin.module.partition(":")[0]]
    modules += [module for offer in plugin.offers if (module := offer.path.partition(":")[0]) not in modules]
    command = [sys.executable, "-c", _PROBE, json.dumps(HEAVY), json.dumps(modules)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    except subprocess.TimeoutExpired:
        yield f"plugin {plugin}: importing it takes more than 60 s"
        return
    if done.returncode:
        yield f"plugin {plugin}: importing its modules fails: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        return
    found: Mapping[str, Sequence[str]] = json.loads(done.stdout.splitlines()[-1])
    for module, names in found.items():
        if names:
            yield f"plugin {plugin}: {module} imports {', '.join(names)} at its top: import them where they are used"


def _methods(protocol: type) -> Iterator[tuple[str, Any]]:
    for base in protocol.__mro__[:-1]:
        for name, member in vars(base).items():
            public = name == "__call__" or not name.startswith("_")
            if public and (callable(member) or isinstance(member, property)):
                yield name, member
