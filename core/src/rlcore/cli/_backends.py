"""What the commands on sandboxes share: a backend from its name and ``--set`` options."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError
from rlcore.plugins import nearest

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
    from pydantic import ValidationError

    from rlcore.resolve import options_class

    config_class = options_class(plugins, "sandbox", name)
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write it as KEY=VALUE, for example --set memory_mb=512")
        options[key.strip().removeprefix("sandbox.")] = _value(text)
    try:
        config = config_class(**options)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            key = ".".join(map(str, detail["loc"]))
            hint = nearest(key, config_class.model_fields) if detail["type"] == "extra_forbidden" else ""
            lines.append(f"--set sandbox.{key}: {detail['msg']}{hint}")
        raise ConfigError("\n".join(lines)) from None
    backend: SandboxBackend = plugins.load("sandbox", name)(config)
    return backend


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
