"""Several corrections as one: rejections, then a weight."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_serializer, model_validator
from rlcore.errors import ConfigError, RlcoreError
from rlcore.plugins import Plugins, load_plugins
from rlcore.protocols import Corrected
from rlcore.resolve import Layer, build_options
from rlcore.types import MicroBatch

from rlcore_losses import _packed as packed
from rlcore_losses._options import Options
from rlcore_losses.corrections import PackedCorrection

__all__ = ["Chain", "Step"]

Tensor = Any

_UNITS = ("token", "row", "group", "batch")


@cache
def own_plugins() -> Plugins:
    """The plugins of this process, for a chain that is built without a configuration."""
    return load_plugins(warn=lambda line: None)


class Step(BaseModel):
    """One correction of a chain: its ``name``; every other key is an option of it."""

    model_config = ConfigDict(frozen=True)

    name: str
    options: Any = None
    target: Any = Field(None, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: Any, info: ValidationInfo) -> Any:
        given = {"name": value} if isinstance(value, str) else dict(value)
        if not isinstance(name := given.pop("name", None), str):
            raise ValueError("every step of a chain has a name, as in {name = 'veto'}")
        plugins = (info.context or {}).get("plugins") or own_plugins()
        target = plugins.load("correction", name)
        try:
            options = build_options(plugins, [Layer("", {name: given})], {name: target.Config})[name]
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return {"name": name, "options": options, "target": target}

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.options.model_dump()}


class Chain:
    """Several corrections as one: a token trains if every step keeps it, and at most one step weighs it.

    Formula: w_t = Π weights of the steps; mask = ∩ masks; counted = ∩ counted
    Reads: what its steps read. Every step judges the batch's whole mask, so their order does not matter; only a
        normalised weight takes its mean over what the other steps left.
    Source: rejection sampling before importance weighting: verl, SkyRL, the MIS example of miles, ROLL.
    """

    name = "chain"

    class Config(Options):
        """The steps."""

        steps: tuple[Step, ...] = Field(
            ..., description="corrections, each with its name and options: [{name = 'veto'}, …]"
        )

        @model_validator(mode="after")
        def _compatible(self) -> Chain.Config:
            if not self.steps:
                raise ValueError("a chain needs at least one step")
            built = [(step.name, step.target(step.options)) for step in self.steps]
            if nested := [name for name, piece in built if isinstance(piece, Chain)]:
                raise ValueError(f"{nested[0]} cannot be a step of a chain: list its steps here")
            weighers = [name for name, piece in built if getattr(piece, "weighs", True)]
            if len(weighers) > 1:
                raise ValueError(
                    f"{' and '.join(weighers)} correct the same thing: one weight for each token is enough"
                )
            by = Counter(statistic for _, piece in built for statistic in getattr(piece, "rejects", ()))
            for statistic, count in by.items():
                if count > 1:
                    names = [name for name, piece in built if statistic in getattr(piece, "rejects", ())]
                    raise ValueError(f"{' and '.join(names)} correct the same thing: both reject by the {statistic}")
            if len({piece.logprobs for _, piece in built}) > 1:
                pairs = ", ".join(f"{name}: {piece.logprobs}" for name, piece in built)
                raise ValueError(f"the steps compare different log-probs ({pairs}): set the same 'logprobs' for all")
            return self

    def __init__(self, config: Config) -> None:
        """Build the steps."""
        self.steps = [(step.name, step.target(step.options)) for step in config.steps]
        self.logprobs: Literal["old", "current"] = self.steps[0][1].logprobs
        self.unit = max((getattr(piece, "unit", "row") for _, piece in self.steps), key=_UNITS.index)
        self.weighs = any(getattr(piece, "weighs", True) for _, piece in self.steps)

    def __call__(self, trainer_logprobs: Tensor, batch: MicroBatch) -> Corrected:
        """See :class:`rlcore.protocols.Correction`."""
        mask = counted = batch.mask
        weights: Tensor = None
        metrics: dict[str, Any] = {}
        for name, piece in sorted(self.steps, key=lambda step: getattr(step[1], "weighs", True)):
            if isinstance(piece, PackedCorrection):
                corrected = piece(trainer_logprobs, batch, remaining=mask)
            else:
                corrected = piece(trainer_logprobs, batch)
            try:
                packed.require_length(name, batch, **{k: getattr(corrected, k) for k in ("weights", "mask", "counted")})
            except AttributeError as error:
                raise RlcoreError(f"{name}: a correction returns rlcore.protocols.Corrected: {error}") from error
            weights = corrected.weights if weights is None else weights * corrected.weights
            mask, counted = mask & corrected.mask, counted & corrected.counted
            metrics |= corrected.metrics
        # a step that keeps its rejected tokens counted may name one that another step removed: mask stays inside
        metrics["correction/rejected_share"] = packed.Measure(batch.mask).share(~mask)
        return Corrected(weights, mask, counted | mask, metrics)
