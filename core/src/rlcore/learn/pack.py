"""Packing: rows one behind the other into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlcore.types import Batch, MicroBatch, Sample

__all__ = ["micro_batches", "pack"]


def micro_batches(batch: Batch, max_tokens: int, unit: Literal["token", "row", "group"] = "token") -> list[list[int]]:
    """Which samples go together: indices into ``batch.samples``, in order, each list at most ``max_tokens`` long.

    A row is never split. With ``unit="group"`` the rows of one group stay together (an aggregation asks for it). A
    unit that is longer than ``max_tokens`` gets a micro-batch of its own.
    """
    units: dict[str, list[int]] = {}
    for index, sample in enumerate(batch.samples):
        units.setdefault(sample.group_id if unit == "group" else str(index), []).append(index)
    packs: list[list[int]] = []
    room = 0
    for members in units.values():
        size = sum(len(batch.samples[i].token_ids) for i in members)
        if not packs or size > room:
            packs.append([])
            room = max_tokens
        packs[-1].extend(members)
        room -= size
    return packs


def pack(batch: Batch, indices: Sequence[int] | None = None) -> MicroBatch:
    """Rows of a batch as one :class:`MicroBatch` of numpy arrays; ``None``: all rows.

    Group and trajectory numbers are those of the whole batch, so they mean the same in every micro-batch.
    """
    import numpy as np

    groups = {g: n for n, g in enumerate(dict.fromkeys(s.group_id for s in batch.samples))}
    trajectories = {t: n for n, t in enumerate(dict.fromkeys(s.trajectory_id for s in batch.samples))}
    rows: list[Sample] = [batch.samples[i] for i in (range(len(batch.samples)) if indices is None else indices)]

    def joined(name: str, dtype: type) -> np.ndarray:
        parts: list[np.ndarray] = [np.asarray(getattr(row, name), dtype=dtype) for row in rows]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)

    return MicroBatch(
        token_ids=joined("token_ids", np.int64),
        mask=joined("mask", np.bool_),
        rollout_logprobs=joined("rollout_logprobs", np.float32),
        advantages=joined("advantages", np.float32),
        turn_ids=joined("turn_ids", np.int32),
        versions=joined("versions", np.int32),
        cu_seqlens=np.cumsum([0, *(len(row.token_ids) for row in rows)]).astype(np.int32),
        row_groups=np.asarray([groups[row.group_id] for row in rows], dtype=np.int32),
        row_trajectories=np.asarray([trajectories[row.trajectory_id] for row in rows], dtype=np.int32),
        policy_version=batch.policy_version,
    )
