"""From layers to a run's configuration: recipe < TOML files < ``--set``; all errors at once, each with key and source."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from rlcore.config import EvaluationConfig, Offered, RunConfig
from rlcore.errors import ConfigError, PluginError, RlcoreError
from rlcore.plugins import Plugins, canonical, nearest, reason
from rlcore.protocols import Recipe

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "Layer",
    "Resolved",
    "file_layer",
    "offered_sections",
    "options_class",
    "resolve",
    "resolve_evaluation",
    "set_layer",
]

Key: TypeAlias = tuple[str, ...]
"""A key in its parts: ``("loss", "clip_low")``."""

_Model = TypeVar("_Model", bound=BaseModel)

_FLOAT = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)?(\.\d+(_\d+)*|\.)?([eE][+-]?\d+)?")


class _Text(str):
    """The right side of a ``--set``, which is read when the type of its key is known."""


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


def set_layer(settings: Sequence[str]) -> Layer:
    """The layer of ``--set KEY=VALUE`` options; of two with one key, the later one counts.

    A value is read as the type of its key wants it: for text, every character counts (``image=1.10`` stays "1.10");
    numbers may be written ``1e-6``, ``1_000`` or ``.5``; tables and lists as in TOML; ``null`` where a key may be empty.

    Raises:
        ConfigError: not of the form ``KEY=VALUE``.
    """
    values: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        try:
            parts = tuple(_leaf(tomllib.loads(f"{key} = 0"))) if equals else ()
        except tomllib.TOMLDecodeError:
            parts = ()
        if not parts:
            raise ConfigError(f"--set {key}: write it as KEY=VALUE, for example --set rollout.temperature=0.8")
        nested: Any = _Text(text)
        for part in reversed(parts):
            nested = {part: nested}
        _merge(values, nested, (), f"--set {key.strip()}", {}, sources)
    return Layer("--set", values, sources)


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
    offer = plugins.offer("recipe", name := _read(section["name"], str))
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


@cache
def offered_sections(schema: type[BaseModel] = RunConfig) -> Mapping[Key, str]:
    """The sections that name an offered class, with its kind; ``trackers`` is a list of them."""

    def find(model: type[BaseModel], at: Key) -> Iterator[tuple[Key, str]]:
        for name, info in model.model_fields.items():
            for arm in _arms(info.annotation):
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
            old, new = _get(self.values, (*key, "name")), _get(layer.values, (*key, "name"))
            if isinstance(old, str) and isinstance(new, str) and not _same_name(old, new):
                _get(self.values, key).clear()
                _forget(self.sources, key)
        _merge(self.values, layer.values, (), layer.source, layer.sources, self.sources)

    def config(self) -> Any:
        """Validate everything.

        Raises:
            ConfigError: says everything that is wrong.
        """
        values = _copy(self.values)
        options: dict[Key, BaseModel | None] = {}

        def named(key: Key, kind: str, section: Mapping[str, Any]) -> dict[str, Any]:
            options[key] = found = self.options(key, kind, section)
            return {"name": _read(section.get("name", "?"), str), **(_dump(found) if found else {})}

        for key, kind in offered_sections(self.schema).items():
            section, default = _get(values, key), self.schema.model_fields[key[0]].default
            if section is None and isinstance(default, Offered):
                section = {"name": default.name}
            if isinstance(section, dict):
                parent = _get(values, key[:-1])
                parent[key[-1]] = named(key, kind, section)
        trackers = _read(values.get("trackers"), list)
        if isinstance(trackers, list):
            values["trackers"] = [
                named(("trackers", str(number)), "tracker", section) if isinstance(section, dict) else section
                for number, section in enumerate(trackers)
            ]
        config = self._validate(self.schema, values, ())
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
        name = _read(section.get("name"), str)
        if not isinstance(name, str) or not name:
            self._note((*key, "name"), f"names no {kind}{nearest('', self.plugins.names(kind))}")
            return None
        try:
            model = options_class(self.plugins, kind, name)
        except PluginError as error:
            self._note((*key, "name"), str(error))
            return None
        return self._validate(model, {key: value for key, value in section.items() if key != "name"}, key)

    def _validate(self, model: type[_Model], values: Mapping[str, Any], section: Key) -> _Model | None:
        """Strictly, as JSON: text is no number, a number is no text, a list may be a tuple or a set."""
        values = {key: _typed(value, _field(model, key)) for key, value in values.items()}
        if model.model_config.get("extra") not in ("allow", "forbid"):
            for key in values.keys() - _keys(model):
                self._note((*section, key), f"unknown key{nearest(key, _keys(model))}")
        try:
            return model.model_validate_json(json.dumps(values, default=str), strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                inside, holder = _place(detail["loc"], values, model)
                self._note((*section, *inside), _say(detail, holder))
            return None

    def _note(self, key: Key, message: str) -> None:
        """Note an error with the source of its key; of a key that is missing, with those of its section."""
        found: set[str] = set()
        for depth in range(len(key), 0, -1):
            above = key[:depth]
            found = {source for k, source in self.sources.items() if k[:depth] == above or k == above[: len(k)]}
            if found:
                break
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


# --- what is wrong, in words ------------------------------------------------------------------------------------------


def _place(location: Sequence[int | str], values: Any, model: Any) -> tuple[Key, Any]:
    """The key of an error and the type that holds it: its location without the tags of unions."""
    key: list[str] = []
    for number, part in enumerate(location):
        there = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        last = number == len(location) - 1
        if not there and not last:
            continue
        key.append(str(part))
        if not last:
            values, model = values[part], _field(model, part)
    return tuple(key), model


def _say(detail: ErrorDetails, holder: Any) -> str:
    kind, message, value = detail["type"], detail["msg"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(detail['loc'][-1]), _keys(holder))}"
    if kind == "missing":
        return "is missing"
    if kind == "secret_literal":
        return message  # and never the value
    if kind in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"should be a table of keys, not {json.dumps(value)}"
    message = message.replace("Input should", "should", 1)
    if isinstance(value, (str, int, float, bool)) or value is None:
        message += f", not {json.dumps(value)}"
    if kind == "string_type" and isinstance(value, (int, float)):
        message += ": put it in quotes"
    return message


# --- types ------------------------------------------------------------------------------------------------------------


def _arms(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: classes and generic types, literals as the types of their values."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return tuple(arm for part in get_args(annotation) for arm in _arms(part))
    if origin is Annotated:
        return _arms(get_args(annotation)[0])
    if origin is Literal:
        return tuple({type(value) for value in get_args(annotation)})
    return (annotation,)


def _field(annotation: Any, key: int | str) -> Any:
    """The type of what ``key`` names in a value of this type; ``Any`` where that is open."""
    for arm in _arms(annotation):
        if isinstance(arm, type) and issubclass(arm, BaseModel):
            for name, info in arm.model_fields.items():
                if key in (name, info.alias):
                    return info.annotation
        elif arguments := get_args(arm):
            return arguments[-1] if isinstance(key, str) else arguments[0]
    return Any


def _keys(annotation: Any) -> set[str]:
    models = (arm for arm in _arms(annotation) if isinstance(arm, type) and issubclass(arm, BaseModel))
    return {info.alias or name for model in models for name, info in model.model_fields.items()}


def _typed(value: Any, annotation: Any) -> Any:
    """A value with every text of ``--set`` in it read as its key's type wants it."""
    if isinstance(value, dict):
        return {key: _typed(inner, _field(annotation, key)) for key, inner in value.items()}
    return _read(value, annotation)


def _read(value: Any, annotation: Any) -> Any:
    if not isinstance(value, _Text):
        return value
    text = str(value)
    arms = {get_origin(arm) or arm for arm in _arms(annotation)}
    if text == "null" and NoneType in arms:
        return None
    parsed = _parse(text)
    if not isinstance(parsed, str):
        wants_text = any(isinstance(arm, type) and issubclass(arm, (str, Path)) for arm in arms)
        if wants_text and not any(type(parsed) is arm for arm in arms):
            return text
        if type(parsed) is int and float in arms and int not in arms:
            return float(parsed)
    return parsed


def _parse(text: str) -> Any:
    """As TOML, and floats also as ``1e-6``, ``1E3``, ``.5``; what is neither is text."""
    if _FLOAT.fullmatch(text) and re.search(r"\d", text) and not re.fullmatch(r"[+-]?[\d_]+", text):
        return float(text.replace("_", ""))
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


# --- nested dictionaries ----------------------------------------------------------------------------------------------


def _get(values: Any, key: Key) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _merge(
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
            _forget(sources, key)
            below[name] = value
            sources[key] = single.get(key, source)
            continue
        if not isinstance(below.get(name), dict):
            _forget(sources, key)
            below[name] = {}
        _merge(below[name], value, key, source, single, sources)


def _forget(sources: dict[Key, str], key: Key) -> None:
    for known in [known for known in sources if known[: len(key)] == key]:
        del sources[known]


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in values.items()}


def _leaf(values: Mapping[str, Any]) -> Iterator[str]:
    """The parts of the only key in it."""
    for key, inner in values.items():
        yield key
        if isinstance(inner, dict):
            yield from _leaf(inner)


def _same_name(one: str, other: str) -> bool:
    """Whether both name one class, as far as names tell; wrong names are not this function's business."""
    try:
        return canonical(one.rpartition(":")[2])[0] == canonical(other.rpartition(":")[2])[0]
    except PluginError:
        return one == other


def _dump(options: BaseModel) -> dict[str, Any]:
    dumped: dict[str, Any] = to_jsonable_python(options, by_alias=True, inf_nan_mode="constants")
    return dumped
