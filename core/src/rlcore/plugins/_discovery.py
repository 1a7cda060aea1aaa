"""Discovery: entry points and modules in development, each loaded on its own."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlcore.errors import ConfigError, PluginError
from rlcore.plugins._records import Plugin
from rlcore.plugins._registry import Plugins, pick

GROUP = "rlcore"

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?", re.ASCII)


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
    plugins = Plugins(warn)
    found = sorted(_scan(), key=lambda p: (p.name != "builtin", p.name, p.distribution))

    off = [pick(name, found) for name in blocked]
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
            plugins.warn(f"{error} (left out)")
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
    try:
        return pick(name, found)
    except PluginError:
        if _MODULE.fullmatch(name) is None:
            raise
        if os.getcwd() not in sys.path:  # a plugin in development; the current folder is searched last
            sys.path.append(os.getcwd())
        if name.isidentifier() and importlib.util.find_spec(name) is None:
            raise
    found.append(Plugin(name, name))
    return found[-1]
