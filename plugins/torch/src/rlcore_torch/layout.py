"""How the rows of a micro-batch lie in one forward: side by side, or merged so that every prefix is computed once.

B rows of a forward, L positions in each, S scores (distinct pairs of a prefix and the token after it), M masked tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rlcore_engine.trie import TokenTrie, build_trie

__all__ = ["Block", "Layout", "packed", "padded", "shared", "useful"]

Array = Any


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive positions and all that they see.

    Attributes:
        start: first query.
        stop: behind the last query.
        keys: ``[m]`` int64 positions that any of them sees, the queries themselves last.
        visible: ``[b, m]`` bool.
    """

    start: int
    stop: int
    keys: Array
    visible: Array


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward and how to read the log-probs of the rows from it; numpy arrays.

    Attributes:
        token_ids: ``[B, L]`` int64.
        positions: ``[B, L]`` int64.
        trie: what the L positions see of each other (B is 1), or ``None``: plain causal.
        sources: ``[S]`` int64 index into the ``B * L`` hidden states: what predicts.
        targets: ``[S]`` int64 token: what is predicted.
        scores: ``[M]`` int64 index into S for every masked token, row by row.
    """

    token_ids: Array
    positions: Array
    trie: TokenTrie | None
    sources: Array
    targets: Array
    scores: Array

    @property
    def size(self) -> int:
        """Positions that are computed."""
        return int(self.token_ids.size)

    def blocks(self, size: int) -> Iterator[Block]:
        """The positions of a trie in blocks of at most ``size`` queries, with the keys that each sees and no others."""
        if self.trie is None:
            raise ValueError("only a trie has blocks")
        for start in range(0, len(self.trie), size):
            stop = min(start + size, len(self.trie))
            keys = np.concatenate([self.trie.path(start), np.arange(start, stop)])
            yield Block(start, stop, keys, self.trie.mask(start, stop, keys))


def useful(token_ids: Sequence[int], mask: Sequence[bool]) -> int:
    """How many tokens of a row must be computed: those before its last masked one."""
    trained = np.flatnonzero(np.asarray(mask))
    return int(trained[-1]) if len(trained) else 0


def padded(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Layout:
    """Rows side by side, padded at their ends: right for every causal model."""
    lengths = [useful(row, mask) for row, mask in zip(rows, masks, strict=True)]
    width = max(lengths)
    token_ids = np.zeros((len(rows), width), np.int64)
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        token_ids[n, :length] = row[:length]
    positions = np.broadcast_to(np.arange(width), token_ids.shape).copy()
    nodes = np.arange(token_ids.size).reshape(token_ids.shape)
    return Layout(token_ids, positions, None, *_scores(rows, masks, nodes))


def packed(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Layout:
    """Rows one behind the other, none merged: for a forward that takes a trie."""
    lengths = np.asarray([useful(row, mask) for row, mask in zip(rows, masks, strict=True)])
    stops = np.cumsum(lengths)
    nodes = tuple(np.arange(stop - length, stop) for stop, length in zip(stops, lengths, strict=True))
    token_ids = np.concatenate([np.asarray(row, np.int64)[:length] for row, length in zip(rows, lengths, strict=True)])
    positions = np.concatenate([np.arange(length) for length in lengths])
    parents = np.where(positions > 0, np.arange(len(positions)) - 1, -1)
    trie = TokenTrie(token_ids, parents, positions, np.repeat(stops, lengths), nodes)
    return Layout(token_ids[None], positions[None], trie, *_scores(rows, masks, nodes))


def shared(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> Layout:
    """Rows merged in a token trie: each prefix is one chain of positions, whichever rows and groups have it."""
    trie = build_trie([row[: useful(row, mask)] for row, mask in zip(rows, masks, strict=True)])
    return Layout(trie.token_ids[None], trie.positions[None], trie, *_scores(rows, masks, trie.row_nodes))


def _scores(rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], nodes: Sequence[Array]) -> Any:
    """Distinct sources and targets, and the number of theirs for each masked token."""
    sources, targets = [], []
    for row, mask, places in zip(rows, masks, nodes, strict=True):
        trained = np.flatnonzero(np.asarray(mask))
        sources.append(places[trained - 1])
        targets.append(np.asarray(row, np.int64)[trained])
    pairs = np.stack([np.concatenate(sources), np.concatenate(targets)], axis=1)
    distinct, index = np.unique(pairs, axis=0, return_inverse=True)
    return distinct[:, 0], distinct[:, 1], index.reshape(-1)
