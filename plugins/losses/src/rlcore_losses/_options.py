"""Base of the options of everything that rlcore-losses offers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Options"]


class Options(BaseModel):
    """Unknown keys are errors, values do not change, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
