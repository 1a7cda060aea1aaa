"""Aggregations: masks and boundaries to per-token weights and this micro-batch's part of the global denominator."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rlcore.types import MicroBatch

from rlcore_losses import _packed as packed

__all__ = ["TokenMean"]

Tensor = Any


class TokenMean:
    """Every counted token weighs the same, whichever row it is in (DAPO; verl ``token-mean``).

    ``weight_t = 1``, denominator = number of counted tokens.
    """

    unit: Literal["token"] = "token"

    class Config(BaseModel):
        """No options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, counted: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See :class:`rlcore.protocols.Aggregation`."""
        packed.require_length("token_mean", batch, counted=counted)
        return counted.float(), counted.sum().float()
