"""Conformance of a policy loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlcore.testing._checks import close, for_many_batches, refused, require_detached, require_same_stats
from rlcore.testing._rows import JUNK, Packed, Row, Token, changed, pack, random_rows, split, trained

__all__ = ["LossConformance"]


class LossConformance:
    """Subclass it in a test module, name the loss, and write its formula for one token in plain Python.

    ::

        class TestMyLoss(LossConformance):
            loss = MyLoss
            options = {"strength": 2.0}

            def term(self, token):
                return -token.advantage * token.logprob, -token.advantage
    """

    loss: ClassVar[type]
    options: ClassVar[Mapping[str, Any]] = {}

    by_row: ClassVar[bool] = False
    """Draw batches whose rows have one advantage, for a loss that is defined for those alone."""

    policy_gradient: ClassVar[bool] = True
    """Whether the gradient is −advantage · token_weight where all log-probs agree and nothing is weighed."""

    sum_tolerance: ClassVar[float] = 1e-6
    """Allowed error of the loss beside 1e-5 relative, as a share of Σ|weighted terms|: what float32 loses where terms of
    both signs cancel. 0 for losses that sum in float64."""

    # --- the reference, written by the author

    def term(self, token: Token) -> tuple[float, float]:
        """The token's term, before it is weighed, and its derivative by ``token.logprob``."""
        raise NotImplementedError("write the formula of one token, or override row()")

    def row(self, tokens: Sequence[Token]) -> Sequence[tuple[float, float]]:
        """Terms and derivatives of the kept tokens of one row; override it for losses that join tokens."""
        return [self.term(token) for token in tokens]

    def extra(self, token: Token) -> tuple[float, float]:
        """A term that the correction's weight does not touch (KL, entropy, imitation), and its derivative."""
        return 0.0, 0.0

    # --- the machine

    def make(self) -> Any:
        """A new instance with ``options``."""
        return self.loss(self.loss.Config(**self.options))  # type: ignore[attr-defined]

    def run(self, packed: Packed) -> tuple[float, list[float], Mapping[str, Any]]:
        """Loss, gradient ``[T]`` and measurements."""
        output = self.make()(packed.logprobs, packed.batch, packed.corrected, packed.token_weights)
        assert tuple(output.loss.shape) == (), f"a loss is a scalar, got {tuple(output.loss.shape)}"
        output.loss.backward()
        gradient = packed.logprobs.grad
        return (
            float(output.loss.detach()),
            [0.0] * len(packed.places) if gradient is None else gradient.tolist(),
            output.metrics,
        )

    def reference(self, rows: Sequence[Row]) -> tuple[list[float], dict[tuple[int, int], float]]:
        """The weighted terms in plain Python, and their gradient by place."""
        parts: list[float] = []
        gradient: dict[tuple[int, int], float] = {}
        for number, row in enumerate(rows):
            kept = [(n, p, t) for n, p, t in trained([row])]
            terms = self.row([token for _, _, token in kept]) if kept else []
            for (_, position, token), (value, slope) in zip(kept, terms, strict=True):
                extra, extra_slope = self.extra(token)
                parts.append(token.token_weight * (token.weight * value + extra))
                gradient[number, position] = token.token_weight * (token.weight * slope + extra_slope)
        return parts, gradient

    def compare(self, rows: Sequence[Row], packed: Packed, what: str) -> None:
        """Fail unless loss and gradient are those of the reference, and 0 where nothing is trained."""
        found, gradient, _ = self.run(packed)
        terms, slopes = self.reference(rows)
        allowed = max(1e-7, self.sum_tolerance * math.fsum(map(abs, terms)))
        close(found, math.fsum(terms), f"{what}: loss", absolute=allowed)
        for place, slope in zip(packed.places, gradient, strict=True):
            if place in slopes:
                close(slope, slopes[place], f"{what}: gradient at row {place[0]}, position {place[1]}")
            else:
                assert slope == 0.0, f"{what}: the gradient of a masked position is {slope}, not exactly 0"

    # --- what is checked

    def test_agrees_with_the_scalar_reference(self) -> None:
        """Forward and gradient, on ragged batches with rejected tokens and weights."""
        for_many_batches(lambda rows, _: self.compare(rows, pack(rows), "reference"), by_row=self.by_row)

    def test_gradient_at_ratio_one_is_the_policy_gradient(self) -> None:
        """Identity: nothing to correct, nothing to clip."""
        if not self.policy_gradient:
            return
        for seed in range(5):
            rows = random_rows(seed, [9, 4, 12], 0.0, by_row=self.by_row, weights=False)
            packed = pack(changed(rows, ref=lambda t: t.logprob, old=lambda t: t.logprob, rollout=lambda t: t.logprob))
            _, gradient, _ = self.run(packed)
            for (number, position), slope in zip(packed.places, gradient, strict=True):
                token = rows[number].positions[position]
                close(slope, 0.0 if token is None else -token.advantage, "gradient at ratio 1")

    def test_masked_positions_have_no_influence(self) -> None:
        """Whatever they hold: NaN, inf, 1e6."""
        rows = random_rows(1, [9, 0, 4, 12], 0.3, by_row=self.by_row)
        for junk in JUNK:
            self.compare(rows, pack(rows, junk), f"masked positions hold {junk}")

    def test_packing_does_not_matter(self) -> None:
        """Padding behind rows, order of rows, and the split into micro-batches change nothing."""

        def check(rows: list[Row], seed: int) -> None:
            self.compare(rows, pack(rows, padding=3), "padded rows")
            loss, _, metrics = self.run(pack(rows))
            for parts in (1, 2, 4):
                runs = [self.run(pack(part)) for part in split(rows, parts, seed)]
                close(math.fsum(run[0] for run in runs), loss, f"{parts} micro-batches", absolute=1e-6)
                require_same_stats([run[2] for run in runs], metrics, f"{parts} micro-batches")

        for_many_batches(check, one_in=5, by_row=self.by_row)

    def test_extreme_ratios_stay_finite(self) -> None:
        """Log-ratios of ±200: exp(20) above, 0 below."""
        for seed, distance in enumerate((200.0, -200.0, 21.0, -30.0)):
            rows = random_rows(seed, [9, 4], 0.0, by_row=self.by_row)
            far = changed(
                rows,
                logprob=-250.0 + max(distance, 0.0),
                old=-250.0 - min(distance, 0.0),
                rollout=-250.0 - min(distance, 0.0),
            )
            packed = pack(far)
            loss, gradient, metrics = self.run(packed)
            assert all(map(math.isfinite, [loss, *gradient])), f"log-ratio {distance}: not finite"
            require_same_stats([metrics], metrics, f"log-ratio {distance}")
            self.compare(far, pack(far), f"log-ratio {distance}")

    def test_only_current_logprobs_get_a_gradient(self) -> None:
        """Not the old, rollout or reference ones, not advantages or weights; measurements are detached."""
        packed = pack(random_rows(3, [9, 4, 12], 0.3, by_row=self.by_row))
        output = self.make()(packed.logprobs, packed.batch, packed.corrected, packed.token_weights)
        output.loss.backward()
        for name, leaf in packed.leaves.items():
            assert leaf.grad is None or not leaf.grad.any(), f"{name} gets a gradient"
        require_detached(output.metrics)

    def test_nothing_to_train_is_zero(self) -> None:
        """A batch without rows, without tokens, or with every token rejected."""
        for rows in ([], [Row()], [Row([None, None])], changed(random_rows(5, [9], 0.3), kept=False)):
            loss, gradient, metrics = self.run(pack(rows))
            assert not any([loss, *gradient]), f"nothing to train, but loss {loss} and gradient {gradient}"
            for name, stat in metrics.items():
                assert stat.value() is None, f"{name} is {stat.value()} over nothing: a missing measurement is None"

    def test_shapes_that_do_not_fit_are_one_error(self) -> None:
        """``[T]`` against ``[T+1]`` is an error that names both, never a broadcast."""
        packed = pack(random_rows(6, [9], 0.3))
        longer = packed.logprobs.detach().new_zeros(packed.logprobs.numel() + 1)
        lengths = (str(longer.numel()), str(packed.logprobs.numel()))
        refused(
            "logprobs [T+1] against a batch of [T]",
            lambda: self.make()(longer, packed.batch, packed.corrected, packed.token_weights),
            *lengths,
        )
