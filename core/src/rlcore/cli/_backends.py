"""What the commands on sandboxes share: a backend from its name and ``--set`` options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.plugins import Plugins
    from rlcore.protocols import SandboxBackend

__all__ = ["build_backend"]


def build_backend(plugins: Plugins, name: str, settings: Sequence[str]) -> SandboxBackend:
    """The backend ``name`` with options given as ``KEY=VALUE`` (or ``sandbox.KEY=VALUE``).

    Raises:
        ConfigError: an option is unknown or wrong.
        PluginError: there is no such backend, or it is broken.
    """
    from rlcore.resolve import build_options, options_class, set_layer

    sections = {"sandbox": options_class(plugins, "sandbox", name)}
    options = build_options(plugins, [set_layer(settings, "sandbox")], sections)["sandbox"]
    backend: SandboxBackend = plugins.load("sandbox", name)(options)
    return backend
