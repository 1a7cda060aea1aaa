"""Keys and values of what runs: one slot a sequence, and what siblings have in common once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["Slots", "Span"]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Keys and values of a run of tokens, ``[layers, K, length, D]`` each (K key heads); never written to again."""

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[2]

    def cut(self, length: int) -> Span:
        """The first ``length`` tokens."""
        return self if length == len(self) else Span(self.keys[:, :, :length], self.values[:, :, :length])

    def then(self, other: Span) -> Span:
        """Both, one behind the other."""
        return Span(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))

    def pick(self, at: Tensor) -> Span:
        """The tokens at ``at``."""
        return Span(self.keys[:, :, at], self.values[:, :, at])


@dataclass(slots=True)
class _Row:
    """A sequence. ``shared`` holds its first tokens, the slot the others; ``current``: by the weights that serve now."""

    tokens: list[int]
    shared: Span | None
    current: bool = True

    @property
    def own(self) -> int:
        """Tokens in the slot."""
        return len(self.tokens) - (len(self.shared) if self.shared is not None else 0)


@dataclass(slots=True)
class _Step:
    """What one decode step needs in every layer.

    Attributes:
        at: ``[n]`` place in each slot where the new token goes.
        length: of the longest slot, the new token included.
        mask: ``[n, 1, 1, length]`` to be added to the scores; ``None`` if all slots are equally long.
        spans: what rows share, each with the number of its rows.
        order: the rows that share something, span by span.
    """

    slots: Tensor
    at: Tensor
    length: int
    mask: Tensor | None
    spans: list[tuple[Span, int]]
    order: Tensor


class Slots:
    """Slots 0 to ``active - 1``, side by side: ``[layers, slots, K, length, D]``, grown as they are needed."""

    def __init__(self, layers: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype, limit: int) -> None:
        """``limit``: longest sequence."""
        self._key_heads, self._groups, self._dim, self._limit = key_heads, heads // key_heads, dim, limit
        self._keys = torch.empty(layers, 0, key_heads, 0, dim, dtype=dtype)
        self._values = torch.empty_like(self._keys)
        self.rows: list[_Row] = []

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self.rows)

    # --- sequences ----------------------------------------------------------------------------------------------------

    def append(self, tokens: Sequence[int], shared: Span | None, own: Span) -> None:
        """A new slot, the last one: first ``shared``, then ``own``."""
        slot = self.active
        self._reserve(slot + 1, len(own))
        self._keys[:, slot, :, : len(own)] = own.keys
        self._values[:, slot, :, : len(own)] = own.values
        self.rows.append(_Row(list(tokens), shared))

    def span(self, slot: int, length: int) -> Span:
        """The first ``length`` tokens of a slot, as they stay when it moves or goes."""
        row = self.rows[slot]
        before = len(row.shared) if row.shared is not None else 0
        if row.shared is not None and length <= before:
            return row.shared.cut(length)
        own = Span(self._keys[:, slot, :, : length - before], self._values[:, slot, :, : length - before])
        return row.shared.then(own) if row.shared is not None else Span(own.keys.clone(), own.values.clone())

    def release(self, slot: int, *, poisoned: bool) -> None:
        """Free a slot; the last one takes its place. ``poisoned``: it may hold numbers that are not finite."""
        if poisoned:  # hidden positions weigh 0, and 0 times NaN is NaN for whoever gets the slot next
            self._keys[:, slot], self._values[:, slot] = 0, 0
        last = self.rows.pop()
        if slot < self.active:
            for store in (self._keys, self._values):
                store[:, slot, :, : last.own] = store[:, self.active, :, : last.own]
            self.rows[slot] = last

    def outdate(self) -> None:
        """The weights change: what runs goes on, and nothing of it is for others."""
        for row in self.rows:
            row.current = False

    def _reserve(self, slots: int, length: int) -> None:
        """Make room, at least doubling what grows, so that the copies stay few."""
        _, have_slots, _, have_length, _ = self._keys.shape
        if slots <= have_slots and length <= have_length:
            return
        slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots, 4)
        length = have_length if length <= have_length else min(max(length, 2 * have_length, 64), self._limit)
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], slots, old.shape[2], length, old.shape[4])
            new[:, : self.active, :, :have_length] = old[:, : self.active]
            setattr(self, name, new)

    # --- one decode step ----------------------------------------------------------------------------------------------

    def begin(self) -> tuple[_Step, Tensor]:
        """Prepare a step of one token for each slot; also the positions ``[n]`` of the tokens."""
        own = [row.own for row in self.rows]
        length = max(own) + 1
        self._reserve(self.active, length)
        at = torch.tensor(own)
        mask = None
        if min(own) + 1 < length:
            hidden = torch.arange(length) > at[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._keys.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        members: dict[int, tuple[Span, list[int]]] = {}
        for slot, row in enumerate(self.rows):
            if row.shared is not None:
                members.setdefault(id(row.shared), (row.shared, []))[1].append(slot)
        spans = [(span, len(rows)) for span, rows in members.values()]
        order = torch.tensor([slot for _, rows in members.values() for slot in rows])
        positions = torch.tensor([len(row.tokens) for row in self.rows])
        return _Step(torch.arange(self.active), at, length, mask, spans, order), positions

    def attend(self, step: _Step, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Write the new keys and values ``[n, K, D]`` and let the queries ``[n, H, D]`` see all; ``[n, H D]``."""
        count = len(queries)
        all_keys, all_values = self._keys[layer, :count], self._values[layer, :count]
        all_keys[step.slots, :, step.at] = keys
        all_values[step.slots, :, step.at] = values
        # queries that share a key head stand side by side as a sequence: no key is copied
        grouped = queries.reshape(count, self._key_heads, self._groups, self._dim)
        seen = all_keys[:, :, : step.length], all_values[:, :, : step.length]
        if not step.spans:
            return F.scaled_dot_product_attention(grouped, *seen, attn_mask=step.mask).reshape(count, -1)
        own, own_sums = _attention(grouped, *seen, step.mask)
        asked = grouped[step.order]
        parts, sums, start = [], [], 0
        for span, size in step.spans:
            together = asked[start : start + size].transpose(0, 1).reshape(1, self._key_heads, -1, self._dim)
            part, part_sums = _attention(together, span.keys[layer][None], span.values[layer][None], None)
            parts.append(part.view(self._key_heads, size, self._groups, self._dim))
            sums.append(part_sums.reshape(self._key_heads, size, self._groups))
            start += size
        shared = torch.cat(parts, 1).transpose(0, 1)
        shared_sums = torch.cat(sums, 1).transpose(0, 1)
        weight = torch.sigmoid(shared_sums - own_sums[step.order])[..., None]
        own[step.order] = torch.lerp(own[step.order].float(), shared.float(), weight).to(own.dtype)
        return own.reshape(count, -1)

    def commit(self, token_ids: Sequence[int]) -> None:
        """The step is done: the slots hold these tokens too."""
        for row, token in zip(self.rows, token_ids, strict=True):
            row.tokens.append(token)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention ``[n, K, q, D]``, and the log of the sum of its weights ``[n, K, q]`` by which two parts are joined."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=mask
    )
    return found
