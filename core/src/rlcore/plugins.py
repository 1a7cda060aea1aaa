"""Discovery of plugins: isolated, loud, and with provenance.

Plugins are modules behind entry points of the group ``rlcore``, or modules that are named by their dotted path. A
broken one is listed with its reason and takes nothing down; one that was asked for by name stops the command. A process
loads its plugins once, with :func:`load_plugins`, and passes the :class:`Plugins` on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from rlcore import hookspecs
from rlcore.errors import ConfigError, PluginError, RlcoreError

if TYPE_CHECKING:
    from rlcore.cli.app import CommandGroup
    from rlcore.config import RunConfig
    from rlcore.types import Problem

__all__ = ["KINDS", "Offer", "Plugin", "Plugins", "canonical", "load_plugins", "nearest", "reason"]

GROUP = "rlcore"

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

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)*([A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w.+!-]*))?", re.ASCII)
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?", re.ASCII)


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
    """

    kind: str
    name: str
    target: str | type
    plugin: str = ""
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.kind} {self.name!r} of {_origin(self.plugin, self.distribution, self.version)}"

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
        return _origin(self.name, self.distribution, self.version)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json`` and the manifest."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "status": self.status,
            "reason": self.reason,
            "offers": [{"kind": o.kind, "name": o.name, "target": o.path} for o in self.offers],
            "hooks": list(self.hooks),
        }


def canonical(name: str) -> tuple[str, str | None]:
    """The normal form of a name and the version it asks for.

    ``my_env``, ``My-Env`` and ``own/my-env@0.1.5`` are one name; ``../x`` and ``a;b`` are none.

    Raises:
        PluginError: it is not a name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise PluginError(
            f"{name!r} is not a name: letters, digits, '-', '_' and '.', as in 'my-env' or 'owner/my-env@1.0'"
        )
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or what there is, or nothing: the tail of a message about an unknown name."""
    known = sorted(set(known))
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is: {', '.join(known)}" if known else ""


class Plugins:
    """The plugins of this process and everything they offer."""

    def __init__(self) -> None:
        """An empty set; :func:`load_plugins` fills one."""
        self._manager = pluggy.PluginManager("rlcore")
        self._manager.add_hookspecs(hookspecs)
        self._by_name: dict[tuple[str, str], list[Offer]] = {}
        self._configured: RunConfig | None = None
        self._muted: set[str] = set()
        self._warn: Callable[[str], None] = _to_stderr
        self.all: list[Plugin] = []

    # --- what is there

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks, to be called directly; :meth:`notify` is for observers."""
        return self._manager.hook

    @property
    def broken(self) -> list[Plugin]:
        """Plugins that could not be loaded."""
        return [plugin for plugin in self.all if plugin.status == "broken"]

    def offers(self, kind: str | None = None) -> list[Offer]:
        """Every offer (of a kind), sorted by kind and name; colliding ones are all in it."""
        found = [offer for plugin in self.all for offer in plugin.offers if kind in (None, offer.kind)]
        return sorted(found, key=lambda offer: (list(KINDS).index(offer.kind), offer.name, offer.distribution))

    def names(self, kind: str) -> list[str]:
        """The names of a kind."""
        return sorted({offer.name for offer in self.offers(kind)})

    def collisions(self) -> list[list[Offer]]:
        """Offers of different plugins that claim one name of one kind."""
        return [offers for offers in self._by_name.values() if len(offers) > 1]

    def find(self, name: str) -> Plugin:
        """The plugin of that name, whatever its status.

        Raises:
            PluginError: unknown, or the name of several distributions (then ``distribution:name`` picks one).
        """
        return _pick(name, self.all)

    # --- names to classes

    def offer(self, kind: str, name: str) -> Offer:
        """What ``name`` stands for: a name, ``distribution:name`` or the path of a class (``package.module:Class``).

        Raises:
            PluginError: unknown (says the nearest name and which plugins are broken), of a version that is not
                installed, or claimed by several plugins.
        """
        if kind not in KINDS:
            raise PluginError(f"{kind!r} is not a kind of offer{nearest(kind, KINDS)}")
        owner, _, bare = name.rpartition(":")
        path = bool(owner) and _TARGET.fullmatch(name) is not None
        if path and canonical(bare)[0] not in {n for k, n in self._by_name if k == kind}:
            return Offer(kind, name, name)
        key, version = canonical(bare)
        found = self._by_name.get((kind, key), [])
        if owner:
            wanted, _ = canonical(owner)
            found = [
                o
                for o in found
                if wanted in (canonical(o.distribution or "-")[0] if o.distribution else "", _key(o.plugin))
            ]
            if not found and path:
                return Offer(kind, name, name)
        if not found:
            message = f"no {kind} named {name!r}{nearest(bare, self.names(kind))}"
            for plugin in self.broken:
                message += f"\n  (plugin {plugin} is broken and may be the one that offers it: {plugin.reason})"
            raise PluginError(message)
        if len(found) > 1:
            choices = " and ".join(f"{o.distribution or o.plugin} {o.version}".strip() for o in found)
            pick = " or ".join(repr(f"{o.distribution or o.plugin}:{o.name}") for o in found)
            raise PluginError(f"{kind} {name!r} is offered by {choices}: name one as {pick}")
        if version is not None and version != found[0].version:
            raise PluginError(f"{name!r} asks for version {version}, but installed is {found[0]}")
        return found[0]

    def load(self, kind: str, name: str) -> Any:
        """The class behind a name, imported now.

        Raises:
            PluginError: as :meth:`offer`, or the target cannot be imported; names plugin, distribution and target.
        """
        offer = self.offer(kind, name)
        if not isinstance(offer.target, str):
            return offer.target
        try:
            loaded = _import(offer.target)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{offer}: cannot load {offer.target!r}: {reason(error)}") from error
        if not callable(loaded):
            raise PluginError(f"{offer}: {offer.target!r} is a {type(loaded).__name__}, not a class")
        return loaded

    def default_recipe(self, plugin: str) -> str:
        """The recipe that a plugin means when it is named without one: its only one, or the one named like it.

        Raises:
            PluginError: it has none, or several and no default (lists them).
        """
        found = self.find(plugin)
        recipes = [offer.name for offer in found.offers if offer.kind == "recipe"]
        default = [name for name in recipes if _key(name) == _key(found.name)] or recipes
        if len(default) == 1:
            return default[0]
        if not recipes:
            raise PluginError(f"plugin {found} offers no recipe: name one{nearest('', self.names('recipe'))}")
        raise PluginError(f"plugin {found} offers several recipes: name one of {', '.join(sorted(recipes))}")

    # --- provenance

    def provenance(self) -> dict[str, Any]:
        """The plugin set for the manifest and for checkpoints: who offers what in which version, and its hash."""
        plugins = [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "offers": sorted(f"{o.kind}:{o.name}={o.path}" for o in plugin.offers),
            }
            for plugin in sorted(self.all, key=lambda p: (p.name, p.distribution))
            if plugin.status == "ok"
        ]
        return {"hash": hashlib.sha256(json.dumps(plugins, sort_keys=True).encode()).hexdigest(), "plugins": plugins}

    @property
    def hash(self) -> str:
        """A hash of names, versions and offers: equal in two processes if and only if their plugin sets are."""
        return str(self.provenance()["hash"])

    # --- calling hooks

    def notify(self, hook: str, **arguments: Any) -> None:
        """Tell the observers. One that raises is switched off with one warning and never harms the run."""
        for implementation in self._implementations(hook):
            plugin = implementation.plugin_name
            if plugin in self._muted:
                continue
            try:
                _call(implementation, arguments)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an observer never harms the run
                self._muted.add(plugin)
                self._warn(f"observer {plugin!r} is switched off: it failed in {hook}: {reason(error)}")

    def configure(self, config: RunConfig) -> None:
        """Tell every plugin the resolved configuration, also those that are registered later.

        Raises:
            ConfigError: a plugin refuses it.
        """
        self._configured = config
        for implementation in self._implementations("rlcore_configure"):
            self._ask(implementation, {"config": config})

    def select_recipe(self, model: str, hardware: str) -> str | None:
        """The name of a recipe for this model and hardware: the first answer of a plugin."""
        for implementation in self._implementations("rlcore_select_recipe"):
            answer = self._ask(implementation, {"model": model, "hardware": hardware})
            if answer is not None:
                return str(answer)
        return None

    def preflight(self, config: RunConfig) -> list[Problem]:
        """What plugins say would make this run fail."""
        return [
            problem
            for implementation in self._implementations("rlcore_preflight")
            for problem in self._ask(implementation, {"config": config}) or ()
        ]

    def add_commands(self, group: CommandGroup) -> None:
        """Let plugins add their commands; one that fails is reported and leaves the others alone."""
        for implementation in self._implementations("rlcore_add_commands"):
            try:
                _call(implementation, {"group": group})
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken command must not break the others
                self._warn(f"the commands of plugin {implementation.plugin_name!r} are missing: {reason(error)}")

    def _implementations(self, hook: str) -> Iterator[pluggy.HookImpl]:
        """Implementations in pluggy's order: the last registered first."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        return reversed(caller.get_hookimpls())

    def _ask(self, implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
        try:
            return _call(implementation, arguments)
        except RlcoreError:
            raise
        except (Exception, SystemExit) as error:
            name = implementation.plugin_name
            raise PluginError(f"plugin {name} failed in {implementation.function.__name__}: {reason(error)}") from error

    # --- registration

    def register(self, plugin: Plugin, implementation: object | None = None) -> None:
        """Import ``plugin`` (if ``implementation`` is not given) and register it; all or nothing.

        Raises:
            PluginError: it cannot be imported or does not fit the hook API; it is then listed as broken.
        """
        self.all.append(plugin)
        name = str(plugin)
        try:
            implementation = _import(plugin.module) if implementation is None else implementation
            plugin.hooks = self._check(implementation)
            if not plugin.hooks and not plugin.distribution:
                raise PluginError("it implements no hook: mark its functions with @rlcore.hookimpl")
            self._manager.register(implementation, name)
            self._manager.check_pending()
            plugin.offers = self._collect(implementation, plugin)
            if self._configured is not None and "rlcore_configure" in plugin.hooks:
                for hook in self._implementations("rlcore_configure"):
                    if hook.plugin is implementation:
                        self._ask(hook, {"config": self._configured})
        except (Exception, SystemExit) as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            plugin.offers = plugin.hooks = ()
            plugin.status, plugin.reason, plugin.cause = "broken", reason(error), error
            raise PluginError(f"plugin {plugin} is broken: {plugin.reason}") from error
        for offer in plugin.offers:
            self._by_name.setdefault((offer.kind, _key(offer.name)), []).append(offer)

    def _check(self, implementation: object) -> tuple[str, ...]:
        """The hooks of a plugin, after refusing what behaves differently across versions of pluggy."""
        wanted = getattr(implementation, "RLCORE_HOOK_API", hookspecs.HOOK_API)
        if wanted != hookspecs.HOOK_API:
            side = "rlcore" if isinstance(wanted, int) and wanted > hookspecs.HOOK_API else "the plugin"
            raise PluginError(
                f"it is written for hook API {wanted!r}, this rlcore has {hookspecs.HOOK_API}: "
                f"install a newer version of {side}"
            )
        hooks = []
        for name in dir(implementation):
            options = self._manager.parse_hookimpl_opts(implementation, name)
            if options is None:
                continue
            if options["wrapper"] or options["hookwrapper"]:
                raise PluginError(f"{name} is a hook wrapper: hooks offer and observe, they do not wrap each other")
            hook = options["specname"] or name
            if hook not in vars(self._manager.hook) and not options["optionalhook"]:
                known = [spec for spec in vars(hookspecs) if spec.startswith("rlcore_")]
                raise PluginError(f"unknown hook {hook!r}{nearest(hook, known)}")
            parameters = inspect.signature(getattr(implementation, name)).parameters.values()
            if defaults := [p.name for p in parameters if p.default is not p.empty]:
                raise PluginError(
                    f"{name} gives a default to {', '.join(defaults)}: "
                    "an implementation names what it uses, without defaults"
                )
            hooks.append(hook)
        return tuple(hooks)

    def _collect(self, implementation: object, plugin: Plugin) -> tuple[Offer, ...]:
        offers: list[Offer] = []
        for kind, hook in KINDS.items():
            for implemented in self._implementations(hook):
                if implemented.plugin is implementation:
                    _call(implemented, {"register": partial(_register, offers, kind, plugin)})
        return tuple(offers)


def load_plugins(
    names: Sequence[str] = (),
    *,
    blocked: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Plugins:
    """Discover and load the plugins of this process.

    Args:
        names: plugins that must be there (``--plugin``): names of entry points, or dotted paths of modules.
        blocked: names of plugins that are not imported (``--no-plugin``).
        environ: where ``RLCORE_PLUGINS`` is looked up. Unset: all plugins; empty: the core's own; ``a,b``: those too.
        warn: gets one line for each broken plugin; writes to stderr by default.

    Raises:
        PluginError: a plugin that was asked for by name is unknown or broken, or is blocked at the same time.
    """
    environ = os.environ if environ is None else environ
    plugins = Plugins()
    plugins._warn = warn or _to_stderr
    found = sorted(_scan(), key=lambda p: (p.name != "builtin", p.name, p.distribution))

    off = [_pick(name, found) for name in blocked]
    selection = environ.get("RLCORE_PLUGINS")
    strict = []
    for name in [*names, *(selection or "").split(",")]:
        if name := name.strip():
            strict.append(_find_or_add(name, found))
            if strict[-1] in off:
                raise ConfigError(f"plugin {name!r} is both asked for and blocked by --no-plugin")

    for plugin in found:
        if plugin in off or (selection is not None and plugin not in strict and plugin.name != "builtin"):
            plugin.status, plugin.reason = "off", "--no-plugin" if plugin in off else "not in RLCORE_PLUGINS"
            plugins.all.append(plugin)
            continue
        try:
            plugins.register(plugin)
        except PluginError as error:
            if plugin in strict:
                raise
            plugins._warn(f"{error} (left out)")
    return plugins


def _scan() -> Iterator[Plugin]:
    """One :class:`Plugin` for each entry point of the group."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        distribution, version = "", ""
        if entry.dist is not None:
            # the first lines of METADATA, without parsing the whole text as an e-mail
            for line in (entry.dist.read_text("METADATA") or entry.dist.read_text("PKG-INFO") or "").splitlines():
                key, _, value = line.partition(": ")
                if key == "Name":
                    distribution = value.strip()
                elif key == "Version":
                    version = value.strip()
                if not line or (distribution and version):
                    break
        yield Plugin(entry.name, entry.value, distribution, version)


def _find_or_add(name: str, found: list[Plugin]) -> Plugin:
    """The plugin of that name or path; else an importable module, which is added as a plugin in development."""
    for plugin in found:
        if plugin.module == name:
            return plugin
    try:
        return _pick(name, found)
    except PluginError:
        if _MODULE.fullmatch(name) is None:
            raise
        if os.getcwd() not in sys.path:  # a plugin in development; the current folder is searched last
            sys.path.append(os.getcwd())
        if name.isidentifier() and importlib.util.find_spec(name) is None:
            raise
    found.append(Plugin(name, name))
    return found[-1]


def _pick(name: str, plugins: Sequence[Plugin]) -> Plugin:
    owner, _, bare = name.rpartition(":")
    key, version = canonical(bare)
    found = [p for p in plugins if _key(p.name) == key]
    if owner:
        found = [p for p in found if p.distribution and canonical(p.distribution)[0] == canonical(owner)[0]]
    if not found:
        raise PluginError(f"no plugin named {name!r}{nearest(bare, [p.name for p in plugins])}")
    if len(found) > 1:
        raise PluginError(
            f"plugin {name!r} is in {' and '.join(f'{p.distribution} {p.version}' for p in found)}: "
            f"name one as {' or '.join(repr(f'{p.distribution}:{p.name}') for p in found)}"
        )
    if version is not None and version != found[0].version:
        raise PluginError(f"{name!r} asks for version {version}, but installed is {found[0]}")
    return found[0]


def _register(offers: list[Offer], kind: str, plugin: Plugin, name: str, target: str | type) -> None:
    """What a plugin gets as ``register``."""
    key, version = canonical(name)
    if version is not None or "/" in name:
        raise PluginError(f"{name!r} is not the name of a {kind}: without owner and version")
    if isinstance(target, str) and _TARGET.fullmatch(target) is None:
        raise PluginError(f"the target of {kind} {name!r} is {target!r}: write it as 'package.module:Class'")
    if not isinstance(target, (str, type)):
        raise PluginError(
            f"the target of {kind} {name!r} is a {type(target).__name__}: a class or 'package.module:Class'"
        )
    if any(offer.kind == kind and _key(offer.name) == key for offer in offers):
        raise PluginError(f"it offers {kind} {name!r} twice")
    offers.append(Offer(kind, name, target, plugin.name, plugin.distribution, plugin.version))


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _import(path: str) -> Any:
    """The object at ``package.module`` or ``package.module:attr.attr``."""
    module, _, attributes = path.replace(" ", "").partition("[")[0].partition(":")
    loaded: Any = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        loaded = getattr(loaded, attribute)
    return loaded


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _origin(plugin: str, distribution: str, version: str) -> str:
    if not plugin:
        return "no plugin"
    return f"{plugin} ({distribution} {version})" if distribution else plugin


def reason(error: BaseException) -> str:
    """What was raised, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, (RlcoreError, pluggy.PluginValidationError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _to_stderr(line: str) -> None:
    print(f"rlcore: warning: {line}", file=sys.stderr)
