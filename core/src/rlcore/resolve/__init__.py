"""From layers to a run's configuration: recipe < TOML files < ``--set``; all errors at once, each with key and source."""

from rlcore.resolve._layers import Layer, file_layer, set_layer
from rlcore.resolve._resolve import (
    Resolved,
    absent,
    build_options,
    evaluation_layer,
    offered_sections,
    options_class,
    resolve,
    resolve_evaluation,
)

__all__ = [
    "Layer",
    "Resolved",
    "absent",
    "build_options",
    "evaluation_layer",
    "file_layer",
    "offered_sections",
    "options_class",
    "resolve",
    "resolve_evaluation",
    "set_layer",
]
