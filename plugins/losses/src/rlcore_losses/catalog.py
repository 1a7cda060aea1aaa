"""What the pieces of an objective say about themselves, read from their docstrings and their options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlcore.errors import ConfigError
from rlcore.plugins import Plugins, nearest

__all__ = ["KINDS", "Entry", "Option", "describe", "find", "listed"]

KINDS = ("correction", "loss", "advantage", "aggregation")
"""The parts of an objective, in the words of the configuration."""

_SECTION = re.compile(r"^(Formula|Reads|Denominator|Source): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, its default as text (``required`` if there is none) and what it means."""

    name: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece.

    Attributes:
        kind: ``correction``, ``loss``, ``advantage`` or ``aggregation``.
        name: as the configuration calls it.
        distribution: where it comes from.
        summary: its first line.
        formula: what it computes; empty where the author does not say.
        reads: log-prob families and shapes.
        denominator: what is divided by.
        source: where it comes from.
        unit: what must lie whole in one call; empty where that is no question.
        options: in order.
    """

    kind: str
    name: str
    distribution: str
    summary: str
    formula: str
    reads: str
    denominator: str
    source: str
    unit: str
    options: tuple[Option, ...]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def describe(kind: str, name: str, distribution: str, cls: Any) -> Entry:
    """An entry from a class: docstring sections ``Formula:``, ``Reads:``, ``Denominator:``, ``Source:``."""
    text = inspect.cleandoc(cls.__doc__ or "")
    parts = _SECTION.split(text)
    sections = {parts[i]: " ".join(parts[i + 1].split()) for i in range(1, len(parts) - 1, 2)}
    options = tuple(
        Option(
            key,
            "required" if field.is_required() else _plain(field.get_default(call_default_factory=True)),
            field.description or "",
        )
        for key, field in cls.Config.model_fields.items()
    )
    return Entry(
        kind=kind,
        name=name,
        distribution=distribution,
        summary=text.split("\n", 1)[0],
        formula=sections.get("Formula", ""),
        reads=sections.get("Reads", ""),
        denominator=sections.get("Denominator", ""),
        source=sections.get("Source", ""),
        unit=str(getattr(cls, "unit", "")),
        options=options,
    )


def _plain(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else str(value)


def listed(plugins: Plugins, kinds: Iterable[str] = KINDS) -> list[Entry]:
    """Every piece that any plugin offers, by kind and name."""
    return [
        describe(kind, offer.name, offer.distribution or offer.plugin, plugins.load(kind, _owned(offer)))
        for kind in kinds
        for offer in plugins.offers(kind)
    ]


def find(plugins: Plugins, name: str) -> Mapping[str, Any]:
    """Class by kind for a name; some names are a loss and an advantage.

    Raises:
        ConfigError: nothing has this name; says the nearest ones.
    """
    found = {}
    for kind in KINDS:
        if name.rpartition(":")[2].lower().replace("-", "_") in {
            known.lower().replace("-", "_") for known in plugins.names(kind)
        }:
            found[kind] = plugins.load(kind, name)
    if not found:
        known = {known for kind in KINDS for known in plugins.names(kind)}
        raise ConfigError(f"no {', '.join(KINDS[:-1])} or {KINDS[-1]} is named {name!r}{nearest(name, known)}")
    return found


def _owned(offer: Any) -> str:
    return f"{offer.distribution or offer.plugin}:{offer.name}"
