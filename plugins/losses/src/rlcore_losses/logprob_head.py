"""Log-probs of the targets from hidden states, without ever holding a full ``[T, V]`` float32 tensor.

Logits are made for some rows at a time, in one buffer that is used again. Two ways to the gradient:

- :func:`selective_logprobs` is general: any loss may follow. Its backward computes the logits of each chunk again.
- :func:`fused_loss` is for losses whose term of a token depends on that token's log-prob alone. The gradient is
  computed while the logits are there, so nothing is computed twice.

Both take a :class:`VocabShard` where the vocabulary is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["VocabShard", "fused_loss", "selective_logprobs"]

Tensor = torch.Tensor

_CHUNK_ELEMENTS = 1 << 25
"""Logits that are held at once (128 MiB of float32), unless the caller says how many rows."""

_CACHED_ELEMENTS = 1 << 18
"""Logits that stay in a core's cache between the passes of a softmax (1 MiB of float32)."""


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary that is split over ranks; ``weight`` holds only its rows.

    Every rank makes the same calls in the same order, whatever its targets are.

    Attributes:
        start: id of the first row of ``weight``.
        largest: ids on the rank that has most, so that all ranks choose the same chunks.
        maximum: elementwise maximum over the ranks.
        total: elementwise sum over the ranks.
    """

    start: int
    largest: int
    maximum: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]

    @classmethod
    def of_group(cls, group: Any, start: int, largest: int) -> VocabShard:
        """Over a ``torch.distributed`` process group."""
        distributed = torch.distributed

        def reduce(operation: Any) -> Callable[[Tensor], Tensor]:
            def run(values: Tensor) -> Tensor:
                values = values.contiguous()
                distributed.all_reduce(values, op=operation, group=group)
                return values

            return run

        return cls(start, largest, reduce(distributed.ReduceOp.MAX), reduce(distributed.ReduceOp.SUM))


def selective_logprobs(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    shard: VocabShard | None = None,
) -> Any:
    """Log-probability of each target under ``softmax(logits / temperature)``.

    The logits are float32 products of the inputs as they are (bfloat16 is exact in float32), and are divided by
    ``temperature`` as the engine does before it samples.

    Args:
        hidden: ``[T, D]`` hidden states, or ``[T, V]`` logits if ``weight`` is ``None``.
        weight: ``[V, D]`` output embedding (this rank's rows of it with ``shard``), or ``None``.
        targets: ``[T]`` int64 token ids.
        temperature: the sampling temperature, > 0.
        chunk: rows at a time; default: as many as make 32 M logits.
        entropy: also return the entropy in nats of each distribution, with its gradient.
        shard: where the vocabulary is split.

    Returns:
        ``[T]`` float32 log-probs (``logprobs`` with gradient), or ``(logprobs, entropy)``.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.
    """
    _require(hidden, weight, targets, temperature)
    rows = chunk or _rows(hidden, weight, shard)
    logprobs, entropies = _SelectiveLogprobs.apply(hidden, weight, targets, float(temperature), rows, entropy, shard)
    return (logprobs, entropies) if entropy else logprobs


def fused_loss(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    loss_of: Callable[[Tensor, slice], Tensor],
    temperature: float = 1.0,
    chunk: int | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Head and loss in one: the gradient is computed in the forward pass, chunk by chunk.

    Args:
        hidden: as for :func:`selective_logprobs`, and so ``weight``, ``targets``, ``temperature``, ``chunk``, ``shard``.
        weight: see there.
        targets: see there.
        loss_of: called with the log-probs ``[c]`` of a chunk (a leaf with gradient) and its slice of ``[T]``; gives
            the weighted sum over its tokens. The term of a token must depend on its own log-prob alone.
        temperature: see there.
        chunk: see there.
        shard: see there.

    Returns:
        The loss, a scalar whose backward may run once, and ``logprobs [T]`` float32 without gradient.
    """
    _require(hidden, weight, targets, temperature)
    rows = chunk or _rows(hidden, weight, shard)
    loss, logprobs = _FusedLoss.apply(hidden, weight, targets, loss_of, float(temperature), rows, shard)
    return loss, logprobs


def _require(hidden: Tensor, weight: Tensor | None, targets: Tensor, temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {list(hidden.shape)} and targets {list(targets.shape)}: expected [T, D] and [T]")
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != hidden.shape[1]):
        raise ValueError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [T, D] and [V, D]")


def _rows(hidden: Tensor, weight: Tensor | None, shard: VocabShard | None) -> int:
    vocabulary = shard.largest if shard else hidden.shape[1] if weight is None else weight.shape[0]
    return max(16, _CHUNK_ELEMENTS // vocabulary)


class _Chunks:
    """The chunks of one pass: float32 logits in a buffer that is used again."""

    def __init__(
        self, hidden: Tensor, weight: Tensor | None, temperature: float, rows: int, shard: VocabShard | None
    ) -> None:
        self.hidden, self.temperature, self.shard = hidden, temperature, shard
        self.rows = max(1, min(rows, hidden.shape[0]))
        half = hidden.is_cuda and weight is not None and hidden.dtype == weight.dtype != torch.float32
        self.tensor_cores = half
        self.weight = weight if weight is None or half else weight.float()
        width = hidden.shape[1] if weight is None else weight.shape[0]
        self.buffer = hidden.new_empty((self.rows, width), dtype=torch.float32)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.hidden.shape[0], self.rows):
            part = slice(start, min(start + self.rows, self.hidden.shape[0]))
            logits = self.buffer[: part.stop - part.start]
            if self.weight is None:
                logits.copy_(self.hidden[part])
            elif self.tensor_cores:
                torch.mm(self.hidden[part], self.weight.t(), out_dtype=torch.float32, out=logits)
            else:
                torch.mm(self.hidden[part].float(), self.weight.t(), out=logits)
            if self.temperature != 1.0:
                logits.div_(self.temperature)
            yield part, logits

    def blocks(self, logits: Tensor) -> Iterator[slice]:
        """Rows that fit into a core's cache; on an accelerator all of them."""
        count, width = logits.shape
        step = count if logits.is_cuda else max(1, _CACHED_ELEMENTS // width)
        for start in range(0, count, max(step, 1)):
            yield slice(start, min(start + step, count))

    def target_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``[c]`` the logits of the targets, from whichever rank has them."""
        local, inside = self.local(targets, logits.shape[1])
        values = logits.gather(1, local[:, None]).squeeze(1)
        return values if self.shard is None else self.shard.total(values.where(inside, values.new_zeros(())))

    def local(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Index of each target in this rank's rows (any, if it is not here), and whether it is here."""
        local = targets - (self.shard.start if self.shard else 0)
        inside = (local >= 0) & (local < width)
        return local.clamp(0, max(width - 1, 0)) if self.shard else local, inside

    def exponentials(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Turn logits into ``exp(logits − top)`` in place; gives ``top [c]`` and this rank's ``sum [c]``."""
        count = logits.shape[0]
        top, mass = logits.new_empty(count), logits.new_empty(count)
        if self.shard is None:
            for block in self.blocks(logits):
                torch.amax(logits[block], 1, out=top[block])
                torch.sum(logits[block].sub_(top[block, None]).exp_(), 1, out=mass[block])
            return top, mass
        top = self.shard.maximum(logits.amax(1))
        for block in self.blocks(logits):
            torch.sum(logits[block].sub_(top[block, None]).exp_(), 1, out=mass[block])
        return top, self.shard.total(mass)

    def subtract_targets(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """``probabilities − onehot(targets)``, in place: minus the derivative of the log-probs by the logits."""
        local, inside = self.local(targets, probabilities.shape[1])
        probabilities.scatter_add_(1, local[:, None], -inside[:, None].to(probabilities.dtype))
        return probabilities


class _Gradients:
    """Where the gradients of hidden states and weight are collected."""

    def __init__(self, chunks: _Chunks, weight: Tensor | None, needs_hidden: bool, needs_weight: bool) -> None:
        self.chunks, self.dtype = chunks, None if weight is None else weight.dtype
        hidden = chunks.hidden
        self.hidden = torch.empty_like(hidden) if needs_hidden else None
        self.weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            if weight is not None and needs_weight
            else None
        )

    def add(self, part: slice, by_logit: Tensor, scale: Tensor | None) -> None:
        """The gradient by a chunk's logits, row ``t`` times ``scale[t]``; the buffer may be changed."""
        hidden, weight = self.chunks.hidden[part], self.chunks.weight
        if weight is None:
            if self.hidden is not None:
                self.hidden[part] = by_logit if scale is None else by_logit.mul_(scale[:, None])
            return
        if self.chunks.tensor_cores:
            by_logit = by_logit if scale is None else by_logit.mul_(scale[:, None])
            half = by_logit.to(hidden.dtype)
            if self.hidden is not None:
                torch.mm(half, weight, out=self.hidden[part])
            if self.weight is not None:
                self.weight += torch.mm(half.t(), hidden, out_dtype=torch.float32)
            return
        if self.hidden is not None:
            product = by_logit @ weight
            self.hidden[part] = product if scale is None else product.mul_(scale[:, None])
        if self.weight is not None:
            rows = hidden.float() if scale is None else hidden * scale[:, None]
            self.weight.addmm_(by_logit.t(), rows)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients in the dtypes of the inputs; that of the hidden states summed over the ranks."""
        shard = self.chunks.shard
        if shard is not None and self.hidden is not None and self.chunks.weight is not None:
            self.hidden = shard.total(self.hidden)
        return self.hidden, None if self.weight is None else self.weight.to(self.dtype)


class _SelectiveLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows: int,
        entropy: bool,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        total = hidden.shape[0]
        logprobs = hidden.new_empty(total, dtype=torch.float32)
        log_z = torch.empty_like(logprobs)
        entropies = hidden.new_zeros(total if entropy else 0, dtype=torch.float32)
        chunks = _Chunks(hidden, weight, temperature, rows, shard)
        for part, logits in chunks:
            target_logits = chunks.target_logits(logits, targets[part])
            shifted = logits.clone() if entropy else None
            top, mass = chunks.exponentials(logits)
            log_mass = mass.log()
            if shifted is not None:
                moment = (logits * shifted.sub_(top[:, None])).sum(1)
                entropies[part] = log_mass - (shard.total(moment) if shard else moment) / mass
            log_z[part] = log_mass + top
            logprobs[part] = (target_logits - top) - log_mass  # around the maximum, where the difference is exact
        ctx.save_for_backward(hidden, weight, targets, log_z, entropies)
        ctx.options = temperature, rows, entropy, shard
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_z, entropies = ctx.saved_tensors
        temperature, rows, entropy, shard = ctx.options
        chunks = _Chunks(hidden, weight, temperature, rows, shard)
        gradients = _Gradients(chunks, weight, *ctx.needs_input_grad[:2])
        for part, logits in chunks:
            scale = grad_logprobs[part] / temperature
            if entropy:
                # d entropy / d logit = −p (log p + H), d logprob / d logit = 1[target] − p
                logits.sub_(log_z[part, None])
                outer = logits.add(entropies[part, None]).mul_(grad_entropy[part, None] / temperature)
                by_logit = logits.exp_().mul_(outer.add_(scale[:, None])).neg_()
                local, inside = chunks.local(targets[part], by_logit.shape[1])
                by_logit.scatter_add_(1, local[:, None], (scale * inside)[:, None])
                gradients.add(part, by_logit, None)
                continue
            for block in chunks.blocks(logits):
                logits[block].sub_(log_z[part][block, None]).exp_()
            gradients.add(part, chunks.subtract_targets(logits, targets[part]), -scale)
        return *gradients.result(), None, None, None, None, None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        loss_of: Callable[[Tensor, slice], Tensor],
        temperature: float,
        rows: int,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        loss = hidden.new_zeros((), dtype=torch.float64)
        chunks = _Chunks(hidden, weight, temperature, rows, shard)
        gradients = _Gradients(chunks, weight, *ctx.needs_input_grad[:2])
        wanted = any(ctx.needs_input_grad[:2])
        for part, logits in chunks:
            target_logits = chunks.target_logits(logits, targets[part])
            top, mass = chunks.exponentials(logits)
            logprobs[part] = (target_logits - top) - mass.log()
            with torch.enable_grad():
                leaf = logprobs[part].detach().clone().requires_grad_(wanted)
                value = loss_of(leaf, part)
            loss += value.detach()
            if wanted and value.requires_grad:
                (slope,) = torch.autograd.grad(value, leaf)
                inverse = mass.reciprocal()
                for block in chunks.blocks(logits):
                    logits[block].mul_(inverse[block, None])
                gradients.add(part, chunks.subtract_targets(logits, targets[part]), -slope / temperature)
            elif gradients.hidden is not None:
                gradients.hidden[part] = 0
        ctx.save_for_backward(*gradients.result())
        ctx.mark_non_differentiable(logprobs)
        return loss, logprobs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # the gradients are nobody else's: scaled where they are; autograd frees them, so a second backward fails
        scaled = [None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in ctx.saved_tensors]
        return *scaled, None, None, None, None, None
