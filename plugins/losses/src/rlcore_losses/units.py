"""What must lie whole: checked before a step, so that a split batch is refused and never silently different."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlcore.errors import ConfigError
from rlcore.types import MicroBatch

__all__ = ["require_whole"]


def require_whole(what: str, unit: str, micro_batches: Sequence[MicroBatch]) -> None:
    """Refuse micro-batches that split what ``what`` (a correction or an aggregation) needs whole.

    Rows always lie whole in a micro-batch, so ``token`` and ``row`` always pass. Groups are compared by
    ``row_groups``, which numbers them over the whole step.

    Raises:
        ConfigError: names the rule, its unit and the remedy.
    """
    if unit == "batch" and len(micro_batches) > 1:
        raise ConfigError(
            f"{what} needs the whole step in one call, but it is split into {len(micro_batches)} micro-batches: "
            "raise the trainer's micro-batch size or choose a rule that can be split"
        )
    if unit == "group":
        seen: set[int] = set()
        for batch in micro_batches:
            groups = set(_plain(batch.row_groups))
            if split := seen & groups:
                raise ConfigError(
                    f"{what} needs every group whole in one micro-batch, but group {min(split)} is split: "
                    "raise the trainer's micro-batch size or choose a rule that can be split"
                )
            seen |= groups


def _plain(values: Any) -> Iterable[int]:
    return [int(value) for value in values]
