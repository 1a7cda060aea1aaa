"""Validation of all layers as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from rlcore.config import EvaluationConfig, Offered, RunConfig
from rlcore.errors import ConfigError, PluginError, RlcoreError
from rlcore.plugins import Plugins, canonical, nearest, reason
from rlcore.protocols import Recipe
from rlcore.resolve._layers import Key, Layer, copy, forget, get, merge
from rlcore.resolve._values import arms, field_of, keys, read, typed
from rlcore.resolve._words import place, say
from rlcore.types import Problem

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A complete, valid configuration.

    Attributes:
        config: typed; the ``options`` of its sections are instances of the offered classes' ``Config``.
        name: the recipe's name; ``None`` without one.
        recipe: the recipe, built with its options.
        origins: the source of every key that was given; keys that are not in it have their default.
    """

    config: RunConfig
    name: str | None
    recipe: Recipe | None
    origins: Mapping[str, str]


def resolve(
    plugins: Plugins, layers: Sequence[Layer], recipe: str | None = None, *, complete: bool = False
) -> Resolved:
    """Lay the layers over the defaults of the recipe and validate everything; later layers win.

    Where a layer names another class in a section, the options that lower layers gave for the former one are dropped.

    Args:
        plugins: where names are looked up.
        layers: files first, then ``--set``.
        recipe: its name; ``None``: as ``recipe.name`` in the layers says, or none.
        complete: the layers hold everything already (a manifest): the recipe is not asked for its defaults.

    Raises:
        ConfigError: every error of every section, with key, source and nearest valid name.
        PluginError: the recipe is unknown or fails.
    """
    if recipe is not None:
        layers = [*layers, Layer("command line", {"recipe": {"name": recipe}})]
    merged = _Merged(plugins, layers)
    section = merged.values.get("recipe")
    if not isinstance(section, dict):
        return Resolved(merged.config(), None, None, merged.dotted())
    options = merged.options(("recipe",), "recipe", section)
    merged.fail()
    offer = plugins.offer("recipe", name := read(section["name"], str))
    try:
        built: Recipe = plugins.load("recipe", name)(options)
        defaults = {} if complete else built.configuration()
    except RlcoreError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{offer} gives no configuration: {reason(error)}") from error
    merged = _Merged(plugins, [Layer(f"recipe {offer.name}", defaults), *layers])
    return Resolved(merged.config(), offer.name, built, merged.dotted())


def resolve_evaluation(plugins: Plugins, layers: Sequence[Layer]) -> EvaluationConfig:
    """The configuration of an evaluation outside a run; later layers win.

    Raises:
        ConfigError: every error of every section, with key, source and nearest valid name.
    """
    config = _Merged(plugins, layers, EvaluationConfig).config()
    assert isinstance(config, EvaluationConfig)
    return config


def evaluation_layer(layer: Layer) -> Layer:
    """What a layer of a run's configuration says about an evaluation outside a run: held-out tasks, where it has them."""
    values = {name: inner for name, inner in layer.values.items() if name not in _ONLY_OF_A_RUN}
    attempts = {to: value for key, to in _ATTEMPTS.items() if (value := layer.get(*key)) is not None}
    below: dict[str, Any] = {"attempts": attempts}
    merge(below, values, (), "", {}, {})
    if heldout := layer.get("eval", "taskset"):
        below["taskset"] = heldout
    return Layer(layer.source, below, layer.sources)


_ONLY_OF_A_RUN = RunConfig.model_fields.keys() - EvaluationConfig.model_fields.keys()
_ATTEMPTS = {
    ("eval", "samples_per_task"): "samples_per_task",
    ("eval", "temperature"): "temperature",
    ("rollout", "top_p"): "top_p",
    ("rollout", "in_flight"): "in_flight",
}
"""What a run's evaluations take from its configuration, and the key of ``attempts`` for it."""


def absent(plugins: Plugins, config: BaseModel) -> Iterator[Problem]:
    """What a configuration names and is only announced by a plugin: the distributions that are to be installed."""
    for key, kind in offered_sections(type(config)).items():
        section: Any = config
        for part in key:
            section = section and getattr(section, part)
        if section and (offer := plugins.offer(kind, section.name)).needs:
            yield Problem(
                "packages", f"{'.'.join(key)}: {kind} {section.name!r} is not installed", f"pip install {offer.needs}"
            )


@cache
def offered_sections(schema: type[BaseModel] = RunConfig) -> Mapping[Key, str]:
    """The sections that name an offered class, with its kind; ``trackers`` is a list of them."""

    def find(model: type[BaseModel], at: Key) -> Iterator[tuple[Key, str]]:
        for name, info in model.model_fields.items():
            for arm in arms(info.annotation):
                if arm is Offered:
                    yield (*at, name), name
                elif isinstance(arm, type) and issubclass(arm, BaseModel):
                    yield from find(arm, (*at, name))

    return dict(find(schema, ()))


def options_class(plugins: Plugins, kind: str, name: str) -> type[BaseModel]:
    """The ``Config`` of an offered class.

    Raises:
        PluginError: unknown name, or the class has none.
    """
    loaded = plugins.load(kind, name)
    config = getattr(loaded, "Config", None)
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        raise PluginError(
            f"{plugins.offer(kind, name)}: {loaded.__name__} has no nested class Config(pydantic.BaseModel)"
        )
    return config


def build_options(plugins: Plugins, layers: Sequence[Layer], sections: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Typed options of sections by themselves, for commands that need no whole configuration; later layers win.

    Args:
        plugins: where nested names are looked up.
        layers: of these sections.
        sections: the class of each section's options; other sections are errors.

    Raises:
        ConfigError: every error of every section, with key, source and nearest valid name.
    """
    merged = _Merged(plugins, layers)
    for name in merged.values.keys() - sections.keys():
        merged.note((name,), f"unknown key{nearest(name, sections)}")
    built: dict[str, Any] = {}
    for name, model in sections.items():
        values = merged.values.get(name, {})
        if isinstance(values, dict):
            built[name] = merged.validate(model, values, (name,))
        else:
            merged.note((name,), f"should be a table of keys, as in {name}.KEY=VALUE")
    merged.fail()
    return built


class _Merged:
    """Layers laid over each other: their values, where each came from, and what is wrong with them."""

    def __init__(
        self, plugins: Plugins, layers: Sequence[Layer], schema: type[RunConfig] | type[EvaluationConfig] = RunConfig
    ) -> None:
        self.plugins = plugins
        self.schema = schema
        self.values: dict[str, Any] = {}
        self.sources: dict[Key, str] = {}
        self.errors: list[str] = []
        for layer in layers:
            self._lay(layer)

    def _lay(self, layer: Layer) -> None:
        for key in offered_sections(self.schema):
            old, new = get(self.values, (*key, "name")), get(layer.values, (*key, "name"))
            if isinstance(old, str) and isinstance(new, str) and not _same_name(old, new):
                get(self.values, key).clear()
                forget(self.sources, key)
        merge(self.values, layer.values, (), layer.source, layer.sources, self.sources)

    def config(self) -> Any:
        """Validate everything.

        Raises:
            ConfigError: says everything that is wrong.
        """
        values = copy(self.values)
        options: dict[Key, BaseModel | None] = {}

        def named(key: Key, kind: str, section: Mapping[str, Any]) -> dict[str, Any]:
            options[key] = found = self.options(key, kind, section)
            return {"name": read(section.get("name", "?"), str), **(_dump(found) if found else {})}

        for key, kind in offered_sections(self.schema).items():
            section, default = get(values, key), self.schema.model_fields[key[0]].default
            if section is None and isinstance(default, Offered):
                section = {"name": default.name}
            if isinstance(section, dict):
                parent = get(values, key[:-1])
                parent[key[-1]] = named(key, kind, section)
        trackers = read(values.get("trackers"), list)
        if isinstance(trackers, list):
            values["trackers"] = [
                named(("trackers", str(number)), "tracker", section) if isinstance(section, dict) else section
                for number, section in enumerate(trackers)
            ]
        config = self.validate(self.schema, values, ())
        self.fail()
        assert config is not None
        for key, instance in options.items():
            offered: Any = config
            for part in key:
                offered = offered[int(part)] if isinstance(offered, tuple) else getattr(offered, part)
            offered._options = instance
        return config

    def options(self, key: Key, kind: str, section: Mapping[str, Any]) -> BaseModel | None:
        """The typed options of a section, or ``None`` after noting what is wrong with it."""
        name = read(section.get("name"), str)
        if not isinstance(name, str) or not name:
            self.note((*key, "name"), f"names no {kind}{nearest('', self.plugins.names(kind))}")
            return None
        try:
            model = options_class(self.plugins, kind, name)
        except PluginError as error:
            self.note((*key, "name"), str(error))
            return None
        return self.validate(model, {key: value for key, value in section.items() if key != "name"}, key)

    def validate(self, model: type[_Model], values: Mapping[str, Any], section: Key) -> _Model | None:
        """Strictly, as JSON: text is no number, a number is no text, a list may be a tuple or a set."""
        values = {key: typed(value, field_of(model, key)) for key, value in values.items()}
        if model.model_config.get("extra") not in ("allow", "forbid"):
            for key in values.keys() - keys(model):
                self.note((*section, key), f"unknown key{nearest(key, keys(model))}")
        try:
            text = json.dumps(values, default=str)
            return model.model_validate_json(text, strict=True, context={"plugins": self.plugins})
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                inside, holder = place(detail["loc"], values, model)
                self.note((*section, *inside), say(detail, holder))
        except PluginError as error:  # a name in the options
            self.note(section, str(error))
        return None

    def note(self, key: Key, message: str) -> None:
        """Note an error with the source of its key; of a key that is missing, with those of its section."""
        found: set[str] = set()
        for depth in range(len(key), 0, -1):
            above = key[:depth]
            found = {source for k, source in self.sources.items() if k[:depth] == above or k == above[: len(k)]}
            if found:
                break
        found.discard("")
        self.errors.append(f"{'.'.join(key)}: {message}" + (f" ({', '.join(sorted(found))})" if found else ""))

    def fail(self) -> None:
        """Raise everything that was noted."""
        if len(self.errors) == 1:
            raise ConfigError(self.errors[0])
        if self.errors:
            raise ConfigError(f"{len(self.errors)} errors in the configuration:\n  " + "\n  ".join(self.errors))

    def dotted(self) -> dict[str, str]:
        """Sources by dotted key."""
        return {".".join(key): source for key, source in self.sources.items()}


def _same_name(one: str, other: str) -> bool:
    """Whether both name one class, as far as names tell; wrong names are not this function's business."""
    try:
        return canonical(one.rpartition(":")[2])[0] == canonical(other.rpartition(":")[2])[0]
    except PluginError:
        return one == other


def _dump(options: BaseModel) -> dict[str, Any]:
    dumped: dict[str, Any] = to_jsonable_python(options, by_alias=True, inf_nan_mode="constants")
    return dumped
