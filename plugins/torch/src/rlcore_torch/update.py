"""One batch: log-probs, correction, summed loss, one denominator, clipping, update."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rlcore.learn.pack import pack
from rlcore.protocols import Corrected, Objective, StepResult
from rlcore.types import Batch, MicroBatch, Stat
from rlcore_losses.metrics import mismatch_metrics

from rlcore_torch.layout import Layout
from rlcore_torch.model import CausalModel
from rlcore_torch.plan import plan

if TYPE_CHECKING:
    from rlcore_torch.worker import Worker

__all__ = ["Stopped", "Update"]

Tensor = torch.Tensor


class Stopped(Exception):
    """The step was asked to stop; nothing has changed since the last whole update."""


@dataclass(slots=True)
class Piece:
    """One micro-batch: where its tokens lie in the batch, how they are computed, and the rows as tensors."""

    places: Tensor
    layout: Layout
    micro: MicroBatch


class Update:
    """The updates that one batch gives: one per epoch. ``heed`` is called between pieces and may raise :class:`Stopped`.

    ``old_logprobs`` are the trainer's log-probs before the first update. The forward of that update gives them: they
    cost nothing of their own, unless the correction must see the whole batch before any piece is trained.
    """

    def __init__(self, worker: Worker, batch: Batch, objective: Objective, heed: Callable[[], None]) -> None:
        self.worker, self.batch, self.objective, self.heed = worker, batch, objective, heed
        self.rows = pack(batch)
        wants_reference = getattr(objective.loss, "needs_ref_logprobs", False)
        self.models = [worker.model, worker.reference] if wants_reference else [worker.model]
        total = self.rows.mask.size
        self.pieces = list(self._pieces())
        self.old = torch.full((total,), math.nan)
        self.weights = torch.zeros(total)
        self.kept = torch.zeros(total, dtype=torch.bool)
        self.stats: dict[str, Stat] = {}
        self.wants_entropies = bool(getattr(objective.loss, "needs_entropies", False))
        self.seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)

    def run(self) -> StepResult:
        """All epochs. Raises :class:`Stopped`."""
        epochs = self.worker.config.epochs
        objective = self.objective
        wants_old = objective.loss.needs_old_logprobs or objective.correction.logprobs == "old" or epochs > 1
        metrics: dict[str, float] = {}
        for reference in self.models[1:]:
            self._add_reference(reference)
        updates = 0
        for epoch in range(epochs):
            made = self._epoch(epoch, wants_old)
            metrics |= made
            updates += not (made["skipped"] or made["nonfinite"])
            if made["nonfinite"]:
                break
        metrics["skipped"] = float(updates == 0)
        metrics |= {name: value for name, stat in self.stats.items() if (value := stat.value()) is not None}
        metrics |= self._mismatch() | self._costs()
        logprobs = [part.tolist() for part in self.old.split(np.diff(self.rows.cu_seqlens).tolist())]
        return StepResult(metrics, logprobs, logprobs if wants_old else None)

    def _pieces(self) -> Iterator[Piece]:
        worker, starts = self.worker, self.rows.cu_seqlens
        units = (self.objective.aggregation.unit, self.objective.correction.unit)
        for rows, layout in plan(
            self.batch.samples,
            by_group="group" in units,
            max_positions=worker.config.micro_batch_tokens,
            share=worker.config.share_prefixes and all(model.can_share for model in self.models),
            in_blocks=all(model.fast for model in self.models),
            reach=min((model.reach for model in self.models if model.reach is not None), default=None),
            pair_cost=worker.model.pair_cost,
        ):
            places = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
            yield Piece(torch.from_numpy(places), layout, pack(self.batch, rows).map(self._tensor))

    def _epoch(self, epoch: int, wants_old: bool) -> dict[str, float]:
        """One update with the whole batch."""
        optimizer = self.worker.optimizer
        optimizer.clear()
        known = self._corrected_together(epoch) if self._needs_all_rows() else None
        loss, denominator = 0.0, 0.0
        for index, piece in enumerate(self.pieces):
            self.heed()
            with self._timed("forward"):
                logprobs = self._logprobs(piece, with_entropies=self.wants_entropies)
                if epoch == 0:
                    self.old[piece.places] = _masked(logprobs, piece).cpu()
                micro = piece.micro
                if wants_old:
                    micro.old_logprobs = logprobs.detach() if epoch == 0 else self._of(self.old, piece)
                if known is None:
                    corrected = self._corrected(micro, logprobs.detach())
                    self._merge(corrected.metrics)
                else:
                    corrected = Corrected(*(self._of(known[i], piece) for i in range(3)), {})
                token_weights, part = self.objective.aggregation(corrected.counted, micro)
                output = self.objective.loss(logprobs, micro, corrected, token_weights)
                self._merge(output.metrics)
            with self._timed("backward"):
                if output.loss.requires_grad:
                    output.loss.backward()
                if index + 1 < len(self.pieces):
                    optimizer.accumulate()
            loss += float(output.loss.detach())
            denominator += float(part)
            if epoch == 0:
                self.weights[piece.places] = corrected.weights.detach().float().cpu()
                self.kept[piece.places] = corrected.mask.cpu()
        self.heed()
        with self._timed("optimizer"):
            return self._apply(loss, denominator)

    def _apply(self, loss: float, denominator: float) -> dict[str, float]:
        """Divide the sums by the one denominator, clip, update; what is not finite changes nothing."""
        optimizer, lr = self.worker.optimizer, self.worker.learning_rate()
        if denominator <= 0:
            optimizer.clear()
            return {"skipped": 1.0, "nonfinite": 0.0}
        norm = optimizer.grad_norm() / denominator
        metrics = {"loss": loss / denominator, "grad_norm": norm, "lr": lr, "skipped": 0.0}
        if not (math.isfinite(norm) and math.isfinite(loss)):
            optimizer.clear()
            return {**metrics, "nonfinite": 1.0}
        limit = self.worker.config.max_grad_norm
        optimizer.step(lr, (limit / norm if norm > limit else 1.0) / denominator)
        return {**metrics, "nonfinite": 0.0}

    def _logprobs(self, piece: Piece, *, with_entropies: bool = False) -> Tensor:
        """``[T]`` current log-probs of a piece, 0 outside the mask; entropies go to the micro-batch."""
        model, chunk = self.worker.model, self.worker.config.logprob_chunk
        if with_entropies:
            scores, entropies = model.logprobs_and_entropies(piece.layout, self.batch.temperature, chunk)
            piece.micro.entropies = self._by_token(entropies, piece)
        else:
            scores = model.logprobs(piece.layout, self.batch.temperature, chunk)
        return self._by_token(scores, piece)

    def _by_token(self, scores: Tensor, piece: Piece) -> Tensor:
        """What is known per score, for every token of the rows; 0 outside the mask."""
        values = scores[self._tensor(piece.layout.scores)]
        return values.new_zeros(piece.places.shape).masked_scatter(piece.micro.mask, values)

    def _add_reference(self, reference: CausalModel) -> None:
        """``ref_logprobs`` of every piece: the same in all epochs."""
        with self._timed("reference"), torch.no_grad():
            for piece in self.pieces:
                self.heed()
                scores = reference.logprobs(piece.layout, self.batch.temperature, self.worker.config.logprob_chunk)
                piece.micro.ref_logprobs = self._by_token(scores, piece)

    def _corrected(self, micro: MicroBatch, current: Tensor) -> Corrected:
        correction = self.objective.correction
        return correction(micro.old_logprobs if correction.logprobs == "old" else current, micro)

    def _needs_all_rows(self) -> bool:
        return self.objective.correction.unit == "batch" and len(self.pieces) > 1

    def _corrected_together(self, epoch: int) -> Corrected:
        """The correction over all rows at once, from a forward of its own where the log-probs are not known yet."""
        current = self.old
        if epoch == 0 or self.objective.correction.logprobs == "current":
            current = torch.full_like(self.old, math.nan)
            with self._timed("forward"), torch.no_grad():
                for piece in self.pieces:
                    self.heed()
                    current[piece.places] = _masked(self._logprobs(piece), piece).cpu()
        micro = self.rows.map(self._tensor)
        micro.old_logprobs = self._tensor(current if epoch == 0 else self.old)
        corrected = self._corrected(micro, self._tensor(current))
        self._merge(corrected.metrics)
        return corrected

    def _of(self, values: Tensor, piece: Piece) -> Tensor:
        """The piece's part of something ``[T]`` over the whole batch."""
        return values[piece.places.to(values.device)].to(self.worker.model.device)

    def _tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array).to(self.worker.model.device)

    def _merge(self, metrics: Mapping[str, Stat]) -> None:
        for name, stat in metrics.items():
            self.stats[name] = self.stats[name].merge(stat) if name in self.stats else stat  # type: ignore[arg-type]

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.worker.model.device.type == "cuda":
                torch.cuda.synchronize(self.worker.model.device)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def _mismatch(self) -> dict[str, float]:
        """What separates trainer and engine, over the whole step."""
        rows = self.rows
        return mismatch_metrics(
            self.old.numpy(),
            rows.rollout_logprobs,
            rows.mask,
            advantages=rows.advantages,
            weights=self.weights.numpy(),
            kept=self.kept.numpy(),
            versions=rows.versions,
            policy_version=rows.policy_version,
            turn_ids=rows.turn_ids,
            cu_seqlens=rows.cu_seqlens,
        )

    def _costs(self) -> dict[str, float]:
        computed = sum(piece.layout.size for piece in self.pieces)
        unit = 1024**3 if sys.platform == "darwin" else 1024**2
        return {
            "tokens": float(self.rows.mask.sum()),
            "positions": float(computed),
            "positions_plain": float(self.rows.mask.size),
            "sharing": self.rows.mask.size / computed,
            "micro_batches": float(len(self.pieces)),
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
            **{f"seconds_{part}": seconds for part, seconds in self.seconds.items()},
        }


def _masked(logprobs: Tensor, piece: Piece) -> Tensor:
    """Without gradient, NaN outside the mask: reading one by mistake shows."""
    return logprobs.detach().masked_fill(~piece.micro.mask, math.nan)
