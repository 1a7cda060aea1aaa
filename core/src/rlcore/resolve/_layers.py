"""Layers of a configuration: nested values, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rlcore.errors import ConfigError
from rlcore.resolve._values import Text

Key: TypeAlias = tuple[str, ...]
"""A key in its parts: ``("loss", "clip_low")``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Nested values from one source.

    Attributes:
        source: as messages name it (``"recipe quickstart"``, ``"file run.toml"``).
        values: sections, as a TOML file would hold them.
        sources: for single keys, where they come from one by one (``"--set loss.name"``).
    """

    source: str
    values: Mapping[str, Any]
    sources: Mapping[Key, str] = field(default_factory=dict)

    def get(self, *key: str) -> Any:
        """What it says at a key, or ``None``."""
        return get(self.values, key)


def file_layer(path: str | Path) -> Layer:
    """The layer of a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML; names file and line.
    """
    try:
        return Layer(f"file {path}", tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path}: {error}") from error


def set_layer(settings: Sequence[str], section: str = "") -> Layer:
    """The layer of ``--set KEY=VALUE`` options; of two with one key, the later one counts.

    ``section``: every key belongs to it, whether it says so or not (``memory_mb`` is ``sandbox.memory_mb``).

    A value is read as the type of its key wants it: for text, every character counts (``image=1.10`` stays "1.10");
    numbers may be written ``1e-6``, ``1_000`` or ``.5``; tables and lists as in TOML; ``null`` where a key may be empty.

    Raises:
        ConfigError: not of the form ``KEY=VALUE``.
    """
    values: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if section and not key.strip().startswith(f"{section}."):
            key = f"{section}.{key.strip()}"
        try:
            parts = tuple(_leaf(tomllib.loads(f"{key} = 0"))) if equals else ()
        except tomllib.TOMLDecodeError:
            parts = ()
        if not parts:
            example = f"{section}.KEY=VALUE" if section else "KEY=VALUE, for example --set rollout.temperature=0.8"
            raise ConfigError(f"--set {key}: write it as {example}")
        nested: Any = Text(text)
        for part in reversed(parts):
            nested = {part: nested}
        merge(values, nested, (), f"--set {key.strip()}", {}, sources)
    return Layer("--set", values, sources)


def get(values: Any, key: Key) -> Any:
    """What is at a key, or ``None``."""
    for part in key:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def merge(
    below: dict[str, Any],
    above: Mapping[str, Any],
    at: Key,
    source: str,
    single: Mapping[Key, str],
    sources: dict[Key, str],
) -> None:
    """Lay ``above`` over ``below`` and note in ``sources`` where each leaf is from: as ``single`` says, else ``source``."""
    for name, value in above.items():
        key = (*at, name)
        if not isinstance(value, Mapping):
            forget(sources, key)
            below[name] = value
            sources[key] = single.get(key, source)
            continue
        if not isinstance(below.get(name), dict):
            forget(sources, key)
            below[name] = {}
        merge(below[name], value, key, source, single, sources)


def forget(sources: dict[Key, str], key: Key) -> None:
    """Drop the sources of a key and of everything in it."""
    for known in [known for known in sources if known[: len(key)] == key]:
        del sources[known]


def copy(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same tables, new; their values are shared."""
    return {key: copy(value) if isinstance(value, dict) else value for key, value in values.items()}


def _leaf(values: Mapping[str, Any]) -> Iterator[str]:
    """The parts of the only key in it."""
    for key, inner in values.items():
        yield key
        if isinstance(inner, dict):
            yield from _leaf(inner)
