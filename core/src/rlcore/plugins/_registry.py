"""The plugins of a process: from names to classes, and from hooks to what implements them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pluggy

from rlcore import hookspecs
from rlcore.errors import PluginError, RlcoreError
from rlcore.plugins._names import canonical, key_of, nearest, reason
from rlcore.plugins._records import KINDS, Offer, Plugin

if TYPE_CHECKING:
    from rlcore.cli.app import CommandGroup
    from rlcore.config import RunConfig
    from rlcore.types import Problem

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class Plugins:
    """The plugins of this process and everything they offer."""

    def __init__(self, warn: Callable[[str], None] | None = None) -> None:
        """An empty set; :func:`load_plugins` fills one. ``warn`` gets warnings, one line each."""
        self._manager = pluggy.PluginManager("rlcore")
        self._manager.add_hookspecs(hookspecs)
        self._by_name: dict[tuple[str, str], list[Offer]] = {}
        self._configured: RunConfig | None = None
        self._muted: set[str] = set()
        self.warn = warn or _to_stderr
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
        """Offers of different plugins that claim one name of one kind; those that give way claim none."""
        real = ([offer for offer in offers if not offer.needs] for offers in self._by_name.values())
        return [offers for offers in real if len(offers) > 1]

    def find(self, name: str) -> Plugin:
        """The plugin of that name, whatever its status.

        Raises:
            PluginError: unknown, or the name of several distributions (then ``distribution:name`` picks one).
        """
        return pick(name, self.all)

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
        found = self._by_name.get((kind, key_of(bare.rpartition("/")[2].partition("@")[0])), [])
        if owner:
            found = [o for o in found if key_of(owner) in (key_of(o.distribution), key_of(o.plugin))]
            known = any(key_of(owner) in (key_of(p.distribution), key_of(p.name)) for p in self.all)
            if not found and ("." in owner or not known) and _TARGET.fullmatch(name):
                return Offer(kind, name, name)
        found = [offer for offer in found if not offer.needs] or found[:1]
        _, version = canonical(bare)
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
        default = [name for name in recipes if key_of(name) == key_of(found.name)] or recipes
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
                self.warn(f"observer {plugin!r} is switched off: it failed in {hook}: {reason(error)}")

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
                self.warn(f"the commands of plugin {implementation.plugin_name!r} are missing: {reason(error)}")

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
            self._by_name.setdefault((offer.kind, key_of(offer.name)), []).append(offer)

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


def pick(name: str, plugins: Sequence[Plugin]) -> Plugin:
    """The plugin that a name, or ``distribution:name``, means."""
    if by_path := [plugin for plugin in plugins if plugin.module == name]:
        return by_path[0]
    owner, _, bare = name.rpartition(":")
    key, version = canonical(bare)
    found = [p for p in plugins if key_of(p.name) == key]
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


def _register(
    offers: list[Offer], kind: str, plugin: Plugin, name: str, target: str | type, *, needs: str = ""
) -> None:
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
    if any(offer.kind == kind and key_of(offer.name) == key for offer in offers):
        raise PluginError(f"it offers {kind} {name!r} twice")
    offers.append(Offer(kind, name, target, plugin.name, plugin.distribution, plugin.version, needs))


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _import(path: str) -> Any:
    """The object at ``package.module`` or ``package.module:attr.attr``."""
    module, _, attributes = path.replace(" ", "").partition("[")[0].partition(":")
    loaded: Any = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        loaded = getattr(loaded, attribute)
    return loaded


def _to_stderr(line: str) -> None:
    print(f"rlcore: warning: {line}", file=sys.stderr)
