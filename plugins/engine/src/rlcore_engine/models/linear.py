"""Linear layers for few rows: the weight lies in oneDNN's own order, which the plain one would be copied into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["Linear"]

_ROWS = 16
"""Rows that the order is chosen for; it serves any number (1.1 to 2.2 times as fast as the plain order, from 512 to 1)."""


class Linear:
    """``x [n, in] -> [n, out]``, made of parts that are computed together (queries, keys and values, say)."""

    def __init__(self, sizes: Sequence[int], inner: int, dtype: torch.dtype, *, biased: bool = False) -> None:
        """``sizes``: rows of each part."""
        self._sizes, self._inner, self._dtype = list(sizes), inner, dtype
        self._packs = torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16)
        self._weight: Tensor | None = None
        self.bias = torch.empty(sum(sizes), dtype=dtype) if biased else None

    def load(self, parts: Sequence[Tensor]) -> None:
        """Take new weights ``[size, in]``, one for each part."""
        plain = [part.to(self._dtype) for part in parts]
        whole = torch.cat(plain) if len(plain) > 1 else plain[0].contiguous()
        self._weight = None  # first, so that its memory is there for the new one
        if self._packs:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS)
        else:
            self._weight = whole.clone() if whole.data_ptr() == parts[0].data_ptr() else whole

    def parts(self) -> list[Tensor]:
        """Copies of the weights in plain order."""
        assert self._weight is not None
        plain = self._weight.to_dense() if self._packs else self._weight
        return [part.clone() for part in plain.split(self._sizes)]

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows [n, in]``, contiguous."""
        if self._packs:
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(rows, self._weight, self.bias)  # type: ignore[arg-type]
