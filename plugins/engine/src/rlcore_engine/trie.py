"""A token trie over rows: every distinct prefix becomes one chain of nodes, so that a forward computes it once.

The packing of shared prefixes, for prefill and for training alike. K nodes, N rows, T tokens of a row.

Nodes stand in depth-first order: a parent before its children, every subtree in one piece. Node ``k`` is visible to
node ``i`` exactly if ``k <= i < ends[k]``. A forward over the nodes with ``token_ids`` at ``positions`` under
:meth:`TokenTrie.mask` gives every row the hidden states of a forward over that row alone. What predicts node ``k`` is
the hidden state of ``parents[k]``, so each node but a root has one log-prob, and those of row ``n`` are
``node_logprobs[row_nodes[n]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

__all__ = ["TokenTrie", "build_trie"]


@dataclass(frozen=True, slots=True)
class TokenTrie:
    """Rows merged by their prefixes; numpy arrays.

    Attributes:
        token_ids: ``[K]`` int64 token of each node.
        parents: ``[K]`` int64 node before it, −1 for the first token of a row; always smaller than the node itself.
        positions: ``[K]`` int64 place of the node in its rows, from 0.
        ends: ``[K]`` int64 first node behind the node's subtree.
        row_nodes: N arrays ``[T_n]`` int64: the node of each token of row n. Equal rows have equal arrays.
    """

    token_ids: Ints
    parents: Ints
    positions: Ints
    ends: Ints
    row_nodes: tuple[Ints, ...]

    def __len__(self) -> int:
        """K, the number of nodes."""
        return len(self.token_ids)

    def mask(self, start: int = 0, stop: int | None = None, keys: Any = None) -> Bools:
        """``[stop - start, len(keys)]``: true where the key is an ancestor of the query or the query itself.

        Queries are the nodes ``[start, stop)``, by default all; ``keys`` are node numbers, by default the queries.
        """
        import numpy as np

        queries = np.arange(start, len(self) if stop is None else stop)
        keys = queries if keys is None else np.asarray(keys)
        return (keys[None, :] <= queries[:, None]) & (queries[:, None] < self.ends[keys][None, :])

    def path(self, node: int) -> Ints:
        """``[positions[node]]``: the ancestors of a node, root first, without the node.

        In depth-first order these are all that a run of nodes beginning at ``node`` can see before it.
        """
        import numpy as np

        before = np.arange(node)
        return before[self.ends[:node] > node]


def build_trie(rows: Sequence[Sequence[int]]) -> TokenTrie:
    """Merge rows (any order, empty ones too); deterministic, and the same nodes whatever order the rows come in."""
    import numpy as np

    arrays = [np.asarray(row, dtype=np.int64).reshape(-1) for row in rows]
    order = sorted(range(len(arrays)), key=lambda n: arrays[n].tolist())
    tokens: list[Ints] = []
    parents: list[Ints] = []
    positions: list[Ints] = []
    row_nodes: list[Ints] = [np.empty(0, np.int64)] * len(arrays)
    ends = np.empty(sum(map(len, arrays)), np.int64)
    last, last_nodes, count = np.empty(0, np.int64), np.empty(0, np.int64), 0
    for n in order:
        row = arrays[n]
        shared = _common_prefix(last, row)
        ends[last_nodes[shared:]] = count
        fresh = np.arange(count, count + len(row) - shared)
        nodes = np.concatenate([last_nodes[:shared], fresh])
        tokens.append(row[shared:])
        parents.append(np.concatenate([[-1], nodes])[shared:-1])
        positions.append(np.arange(shared, len(row)))
        row_nodes[n] = nodes
        last, last_nodes, count = row, nodes, count + len(fresh)
    ends[last_nodes] = count
    empty = [np.empty(0, np.int64)]
    return TokenTrie(
        np.concatenate(tokens or empty),
        np.concatenate(parents or empty),
        np.concatenate(positions or empty),
        ends[:count].copy(),
        tuple(row_nodes),
    )


def _common_prefix(a: Ints, b: Ints) -> int:
    """Number of leading tokens that are the same."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()[0]
    return int(different[0]) if len(different) else n
