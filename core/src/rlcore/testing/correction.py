"""Conformance of a correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlcore.protocols import Corrected
from rlcore.testing._checks import close, for_many_batches, refused, require_detached, require_same_stats
from rlcore.testing._rows import JUNK, Packed, Row, Token, changed, pack, random_rows, split

__all__ = ["CorrectionConformance"]


class CorrectionConformance:
    """Subclass it in a test module, name the correction, and write what it decides about one token in plain Python.

    ``token.old`` is the trainer's log-prob that the correction is called with. ::

        class TestMyCorrection(CorrectionConformance):
            correction = MyCorrection
            options = {"high": 3.0}

            def token(self, token):
                return min(capped_exp(token.old - token.rollout), 3.0), True
    """

    correction: ClassVar[type]
    options: ClassVar[Mapping[str, Any]] = {}

    rejected_stay_counted: ClassVar[bool] = False
    """Whether rejected tokens stay in the denominator with these options."""

    # --- the reference, written by the author

    def token(self, token: Token) -> tuple[float, bool]:
        """The token's weight, and whether it is kept."""
        raise NotImplementedError("write what is decided about one token, or override row()")

    def row(self, tokens: Sequence[Token]) -> Sequence[tuple[float, bool]]:
        """The same for the tokens of one row; override it for corrections that judge rows or turns."""
        return [self.token(token) for token in tokens]

    def step(self, rows: Sequence[Sequence[Token]]) -> Sequence[Sequence[tuple[float, bool]]]:
        """The same for all rows of a step; override it for corrections whose unit is the batch."""
        return [self.row(tokens) for tokens in rows]

    # --- the machine

    def make(self) -> Any:
        """A new instance with ``options``."""
        return self.correction(self.correction.Config(**self.options))  # type: ignore[attr-defined]

    def run(self, packed: Packed) -> Corrected:
        """What the correction decides."""
        corrected: Corrected = self.make()(packed.leaves["old_logprobs"], packed.batch)
        for name in ("weights", "mask", "counted"):
            found = tuple(getattr(corrected, name).shape)
            assert found == tuple(packed.batch.mask.shape), f"{name} is {list(found)}, not [T]"
        return corrected

    def compare(self, rows: Sequence[Row], packed: Packed, what: str) -> None:
        """Fail unless weights and masks are those of the reference."""
        corrected = self.run(packed)
        decided = {
            (number, position): decision
            for number, (row, decisions) in enumerate(zip(rows, self.step([row.tokens for row in rows]), strict=True))
            for position, decision in zip(
                [p for p, token in enumerate(row.positions) if token is not None], decisions, strict=True
            )
        }
        weights, mask, counted = (getattr(corrected, n).tolist() for n in ("weights", "mask", "counted"))
        for index, place in enumerate(packed.places):
            where = f"{what}: row {place[0]}, position {place[1]}"
            if place not in decided:
                assert not any((mask[index], counted[index])), f"{where} is outside the batch's mask but is kept"
                continue
            weight, kept = decided[place]
            assert mask[index] == kept, f"{where}: kept is {mask[index]}, wanted {kept}"
            assert counted[index] == (kept or self.rejected_stay_counted), f"{where}: counted is {counted[index]}"
            if kept:
                close(weights[index], weight, f"{where}: weight")

    # --- what is checked

    def test_agrees_with_the_scalar_reference(self) -> None:
        """On ragged batches of all sizes of mismatch."""
        for_many_batches(lambda rows, _: self.compare(rows, pack(rows), "reference"))

    def test_nothing_happens_at_ratio_one(self) -> None:
        """Equal log-probs: every weight is 1 and every token is kept."""
        for seed in range(5):
            packed = pack(changed(random_rows(seed, [9, 4, 12], 0.3), rollout=lambda t: t.old))
            corrected = self.run(packed)
            assert corrected.mask.equal(packed.batch.mask), "tokens are rejected at ratio 1"
            assert corrected.counted.equal(packed.batch.mask), "tokens are not counted at ratio 1"
            for weight in corrected.weights[packed.batch.mask].tolist():
                close(weight, 1.0, "weight at ratio 1")

    def test_masked_positions_have_no_influence(self) -> None:
        """Whatever they hold: NaN, inf, 1e6."""
        rows = random_rows(1, [9, 0, 4, 12], 0.3)
        plain = self.run(pack(rows, 0.0)).metrics
        for junk in JUNK:
            self.compare(rows, pack(rows, junk), f"masked positions hold {junk}")
            require_same_stats([self.run(pack(rows, junk)).metrics], plain, f"masked positions hold {junk}")

    def test_packing_does_not_matter(self) -> None:
        """Padding, and for what needs no whole step: order of rows and micro-batches."""

        def check(rows: list[Row], seed: int) -> None:
            self.compare(rows, pack(rows, padding=3), "padded rows")
            if self.make().unit not in ("token", "row"):
                return
            whole = self.run(pack(rows)).metrics
            for parts in (1, 3):
                pieces = split(rows, parts, seed)
                for piece in pieces:
                    self.compare(piece, pack(piece), f"{parts} micro-batches")
                require_same_stats([self.run(pack(p)).metrics for p in pieces], whole, f"{parts} micro-batches")

        for_many_batches(check, one_in=5)

    def test_extreme_ratios_stay_finite(self) -> None:
        """Log-ratios of ±200: exp(20) above, 0 below, unless a bound says otherwise."""
        for seed, distance in enumerate((200.0, -200.0, 21.0, -30.0)):
            far = changed(
                random_rows(seed, [9, 4], 0.0), old=-250.0 + max(distance, 0.0), rollout=-250.0 - min(distance, 0.0)
            )
            packed = pack(far)
            corrected = self.run(packed)
            assert corrected.weights[packed.batch.mask].isfinite().all(), f"log-ratio {distance}: weights not finite"
            require_same_stats([corrected.metrics], corrected.metrics, f"log-ratio {distance}")
            self.compare(far, packed, f"log-ratio {distance}")

    def test_results_are_detached(self) -> None:
        """No gradient flows through a weight or a measurement."""
        corrected = self.run(pack(random_rows(3, [9, 4, 12], 0.3)))
        require_detached({"weights": corrected.weights, **corrected.metrics})
        assert str(corrected.weights.dtype) == "torch.float32", f"weights are {corrected.weights.dtype}, not float32"
        assert str(corrected.mask.dtype) == str(corrected.counted.dtype) == "torch.bool"

    def test_the_batch_is_left_as_it_was(self) -> None:
        """A correction changes nothing in place."""
        packed = pack(random_rows(4, [9, 4, 12], 0.3), 5.0)
        before = {name: leaf.detach().clone() for name, leaf in packed.leaves.items()}
        mask = packed.batch.mask.clone()
        self.run(packed)
        assert packed.batch.mask.equal(mask), "the batch's mask was changed"
        for name, leaf in packed.leaves.items():
            assert leaf.detach().equal(before[name]), f"{name} was changed"

    def test_nothing_to_correct_is_nothing(self) -> None:
        """A batch without rows or without tokens."""
        for rows in ([], [Row()], [Row([None, None])]):
            corrected = self.run(pack(rows))
            assert not (corrected.mask | corrected.counted).any(), "there is nothing to keep or count"
            for name, stat in corrected.metrics.items():
                value = stat.value()
                assert value is None, f"{name} is {value} over nothing: a missing measurement is None"

    def test_shapes_that_do_not_fit_are_one_error(self) -> None:
        """``[T]`` against ``[T+1]`` is an error that names both, never a broadcast."""
        packed = pack(random_rows(6, [9], 0.3))
        longer = packed.logprobs.detach().new_zeros(packed.logprobs.numel() + 1)
        lengths = (str(longer.numel()), str(packed.logprobs.numel()))
        refused("trainer_logprobs [T+1] against a batch of [T]", lambda: self.make()(longer, packed.batch), *lengths)

    def test_declares_what_it_needs(self) -> None:
        """Which log-probs it compares, and what must lie whole."""
        made = self.make()
        assert made.logprobs in ("old", "current"), f"logprobs is {made.logprobs!r}"
        assert made.unit in ("token", "row", "group", "batch"), f"unit is {made.unit!r}"
