"""How the rows of a micro-batch lie in one forward: side by side, or merged so that every prefix is computed once.

B rows of a forward, L positions in each, S scores (distinct pairs of a prefix and the token after it), M masked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rlcore_engine.trie import build_trie

__all__ = ["Layout", "padded", "shared"]

Array = Any


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward and how to read the log-probs of the rows from it; numpy arrays.

    Attributes:
        token_ids: ``[B, L]`` int64.
        positions: ``[B, L]`` int64.
        attention: ``[L, L]`` bool, true where a query sees a key (B is 1), or ``None``: plain causal.
        sources: ``[S]`` int64 index into the ``B * L`` hidden states: what predicts.
        targets: ``[S]`` int64 token: what is predicted.
        scores: ``[M]`` int64 index into S for every masked token, row by row.
    """

    token_ids: Array
    positions: Array
    attention: Array | None
    sources: Array
    targets: Array
    scores: Array

    @property
    def size(self) -> int:
        """Positions that are computed."""
        return int(self.token_ids.size)


def useful(token_ids: Sequence[int], mask: Sequence[bool]) -> int:
    """How many tokens of a row must be computed: those before its last masked one."""
    return int(np.flatnonzero(np.asarray(mask))[-1]) if any(mask) else 0


def padded(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Layout:
    """Rows side by side, padded at their ends: right for every causal model."""
    lengths = [useful(row, mask) for row, mask in zip(rows, masks, strict=True)]
    width = max(lengths)
    token_ids = np.zeros((len(rows), width), np.int64)
    sources, targets = [], []
    for n, (row, mask, length) in enumerate(zip(rows, masks, lengths, strict=True)):
        token_ids[n, :length] = row[:length]
        trained = np.flatnonzero(np.asarray(mask))
        sources.append(n * width + trained - 1)
        targets.append(np.asarray(row, np.int64)[trained])
    source, target = np.concatenate(sources), np.concatenate(targets)
    positions = np.broadcast_to(np.arange(width), token_ids.shape).copy()
    return Layout(token_ids, positions, None, source, target, np.arange(len(source)))


def shared(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Layout:
    """Rows merged in a token trie: each prefix is one chain of positions, whichever rows and groups have it."""
    trie = build_trie([row[: useful(row, mask)] for row, mask in zip(rows, masks, strict=True)])
    parents, tokens = [], []
    for row, mask, nodes in zip(rows, masks, trie.row_nodes, strict=True):
        trained = np.flatnonzero(np.asarray(mask))
        parents.append(nodes[trained - 1])
        tokens.append(np.asarray(row, np.int64)[trained])
    pairs = np.stack([np.concatenate(parents), np.concatenate(tokens)], axis=1)
    scores, index = np.unique(pairs, axis=0, return_inverse=True)
    return Layout(
        trie.token_ids[None], trie.positions[None], trie.mask(), scores[:, 0], scores[:, 1], index.reshape(-1)
    )
