"""Which known tokens a prompt begins with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["PrefixStore", "common_prefix"]

Kept = TypeVar("Kept")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that are the same."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixStore(Generic[Kept]):
    """Keys and values of finished requests by their tokens; the least recently used go first."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` in tokens."""
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int, ...], Kept] = OrderedDict()
        self.tokens = 0

    def put(self, token_ids: Sequence[int], kept: Kept) -> None:
        """Keep; what is a prefix of it is not kept twice."""
        key = tuple(token_ids)
        if not self.worth(key):
            return
        for other in [entry for entry in self._entries if key[: len(entry)] == entry]:
            self._drop(other)
        self._entries[key] = kept
        self.tokens += len(key)
        while self.tokens > self._capacity:
            self._drop(next(iter(self._entries)))

    def worth(self, token_ids: Sequence[int]) -> bool:
        """Whether :meth:`put` would keep it."""
        key = tuple(token_ids)
        return 0 < len(key) <= self._capacity and not any(entry[: len(key)] == key for entry in self._entries)

    def entries(self) -> Iterable[tuple[tuple[int, ...], Kept]]:
        """Tokens and what is kept of them."""
        return self._entries.items()

    def touch(self, token_ids: Sequence[int]) -> None:
        """It was used."""
        self._entries.move_to_end(tuple(token_ids))

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self.tokens = 0

    def _drop(self, key: tuple[int, ...]) -> Any:
        self.tokens -= len(key)
        return self._entries.pop(key)
