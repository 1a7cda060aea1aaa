"""Which rows go into one forward, and whether it computes their common prefixes once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rlcore.types import Sample
from rlcore_engine.trie import build_trie

from rlcore_torch.layout import Layout, packed, padded, shared, useful

__all__ = ["plan"]

_SMALL = 256
"""A trie of so many positions is never split for the sake of its attention."""

Unit = list[int]
"""Rows that must lie in one piece."""


def plan(
    samples: Sequence[Sample],
    *,
    by_group: bool,
    max_positions: int,
    share: bool,
    in_blocks: bool,
    reach: int | None,
    pair_cost: float,
) -> list[tuple[list[int], Layout]]:
    """Pieces of a batch: indices into ``samples`` and the layout of their forward.

    Rows without a masked token are left out. The pieces follow from the rows, whatever order they come in.

    Args:
        samples: the rows.
        by_group: the rows of one group must lie in one piece.
        max_positions: bound of a forward; a unit that is longer has a piece of its own.
        share: prefixes may be merged.
        in_blocks: the forward takes tries in blocks, so that a merged layout never costs more than its rows apart.
        reach: longest row that may lie in a trie; ``None``: any.
        pair_cost: without blocks, the cost of a query-key pair in a merged layout over that of a position without
            attention.
    """
    lengths = [useful(sample.token_ids, sample.mask) for sample in samples]
    units: dict[str, Unit] = {}
    for index, length in enumerate(lengths):
        if length:
            units.setdefault(samples[index].group_id if by_group else str(index), []).append(index)
    trie = build_trie([sample.token_ids[:length] for sample, length in zip(samples, lengths, strict=True)])
    nodes = trie.row_nodes
    ordered = sorted(units.values(), key=lambda unit: min((int(nodes[r][-1]), r) for r in unit))
    near: list[Unit] = []
    alone: list[Unit] = []
    for unit in ordered:
        within = reach is None or max(lengths[r] for r in unit) <= reach
        (near if within and (share or in_blocks) else alone).append(unit)
    if not share:
        nodes = tuple(np.arange(length) + sum(lengths[:r]) for r, length in enumerate(lengths))
    # without blocks every pair of a trie is computed: beyond this size its attention costs more than all the rest
    most = max_positions if in_blocks else min(max_positions, max(_SMALL, int(1 / pair_cost)))
    pieces: list[tuple[list[int], Layout]] = []
    for members in _merge(near, nodes, most):
        rows = _flat(members)
        size = len(np.unique(np.concatenate([nodes[r] for r in rows])))
        if in_blocks or size * (1 + pair_cost * size) < _cost_apart(members, lengths, max_positions, pair_cost):
            pieces.append((rows, (shared if share else packed)(*_rows(samples, rows))))
        else:
            alone.extend(members)
    for rows in _side_by_side(alone, lengths, max_positions):
        pieces.append((rows, padded(*_rows(samples, rows))))
    return pieces


def _rows(samples: Sequence[Sample], rows: Sequence[int]) -> tuple[list[list[int]], list[list[bool]]]:
    return [samples[r].token_ids for r in rows], [samples[r].mask for r in rows]


def _flat(units: Iterable[Unit]) -> list[int]:
    return [row for unit in units for row in unit]


def _merge(units: Sequence[Unit], nodes: Sequence[Any], max_positions: int) -> list[list[Unit]]:
    """Consecutive units whose union in the trie has at most ``max_positions`` nodes."""
    packs: list[list[Unit]] = []
    seen: set[int] = set()
    for unit in units:
        added = set().union(*(nodes[r].tolist() for r in unit))
        if not packs or len(seen | added) > max_positions:
            packs.append([])
            seen = set()
        packs[-1].append(unit)
        seen |= added
    return packs


def _side_by_side(units: Sequence[Unit], lengths: Sequence[int], max_positions: int) -> list[list[int]]:
    """Rows in packs of at most ``max_positions`` after padding; rows of like length stand together."""
    packs: list[list[int]] = []
    width = 0
    for unit in sorted(units, key=lambda unit: max(lengths[r] for r in unit)):
        longest = max(lengths[r] for r in unit)
        if not packs or (len(packs[-1]) + len(unit)) * max(width, longest) > max_positions:
            packs.append([])
            width = 0
        packs[-1].extend(unit)
        width = max(width, longest)
    return packs


def _cost_apart(units: Sequence[Unit], lengths: Sequence[int], max_positions: int, pair_cost: float) -> float:
    """What the rows cost side by side, where causal attention sees half of the pairs."""
    widths = [(len(rows), max(lengths[r] for r in rows)) for rows in _side_by_side(units, lengths, max_positions)]
    return sum(count * width * (1 + pair_cost * width / 2) for count, width in widths)
