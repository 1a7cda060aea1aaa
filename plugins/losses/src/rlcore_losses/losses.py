"""Policy losses, token by token: terms that are weighted and summed.

Here ``r_t = exp(min(logprobs_t − q_t, 20))`` with ``q`` the log-probs that ``ratio_to`` names: ``old_logprobs`` (the
current ones, detached, where there are none: ``r_t = 1`` and the gradient is the policy gradient) or
``rollout_logprobs``. A ratio at its cap has no gradient. The loss is ``Σ_t weight_t · token_weight_t · term_t`` over the
tokens that the correction kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from rlcore.errors import RlcoreError
from rlcore.protocols import Corrected, LossOutput
from rlcore.types import MicroBatch, Stat

from rlcore_losses import _packed as packed
from rlcore_losses._options import Options

__all__ = ["CISPO", "DPPOKL", "DPPOTV", "SAPO", "CrossEntropy", "PPOClip", "PolicyLoss", "Reinforce", "Tokens"]

Tensor = Any


@dataclass(frozen=True)
class Tokens:
    """What a loss works on: ``[T]`` float64, selected by ``mask`` (0 elsewhere).

    Attributes:
        logprobs: current, with gradient.
        advantages: detached.
        mask: bool, the tokens that the correction kept.
        measure: measurements over the mask.
        batch: the batch itself, for boundaries.
    """

    logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    measure: packed.Measure
    batch: MicroBatch

    def family(self, name: str) -> Tensor:
        """``old``, ``rollout`` or ``ref`` log-probs, detached; ``old`` falls back to the current ones."""
        values = getattr(self.batch, f"{name}_logprobs")
        if values is None:
            if name != "old":
                raise RlcoreError(f"batch.{name}_logprobs is needed, and this trainer does not give it")
            return self.logprobs.detach()
        return packed.select(values.detach(), self.mask)


class PolicyLoss:
    """What every loss here shares: selection, KL and entropy terms, the weighted sum.

    Attributes:
        name: as registered.
        needs_old_logprobs: see :class:`rlcore.protocols.Loss`.
        needs_ref_logprobs: whether ``batch.ref_logprobs`` must be there.
        needs_entropies: whether ``batch.entropies`` must be there.
        per_token: the term of a token depends on that token's log-prob alone, so the head may be fused with it.
        weighted: the correction's weights apply.
        corrects: it weighs the gap to the engine itself, so the correction must not.
    """

    name: ClassVar[str]
    needs_old_logprobs: bool = False
    per_token: ClassVar[bool] = True
    weighted: ClassVar[bool] = True

    class Config(Options):
        """Terms that any policy loss may carry beside its own."""

        kl_coef: float = Field(0.0, ge=0, description="weight of the KL term")
        kl: Literal["k1", "k2", "k3", "unbiased"] = Field(
            "k3", description="estimate of KL(current ‖ other); k3 is the low-variance one, see docs for its gradient"
        )
        kl_to: Literal["ref", "old", "rollout"] = Field("ref", description="the other log-probs")
        entropy_coef: float = Field(0.0, description="weight of the entropy bonus")

    config: Any

    def __init__(self, config: Config) -> None:
        """Keep the options."""
        self.config = config
        self.needs_ref_logprobs = config.kl_coef > 0 and config.kl_to == "ref"
        self.needs_entropies = config.entropy_coef != 0

    @property
    def corrects(self) -> bool:
        """See the class."""
        return getattr(self.config, "ratio_to", None) == "rollout"

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """Terms ``[T]`` with gradient, and measurements over ``tokens.mask``."""
        raise NotImplementedError

    def __call__(self, logprobs: Tensor, batch: MicroBatch, corrected: Corrected, token_weights: Tensor) -> LossOutput:
        """See :class:`rlcore.protocols.Loss`."""
        packed.require_length(
            self.name,
            batch,
            logprobs=logprobs,
            old_logprobs=batch.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            ref_logprobs=batch.ref_logprobs,
            entropies=batch.entropies,
            advantages=batch.advantages,
            weights=corrected.weights,
            mask=corrected.mask,
            token_weights=token_weights,
        )
        parts = packed.blocks(batch) if self.per_token else [slice(0, batch.mask.numel())]
        if len(parts) == 1:
            return self._weighed(logprobs, batch, corrected, token_weights)
        from rlcore_losses._blocks import summed

        metrics: dict[str, Stat] = {}

        def term(inside: Tensor, entropies: Tensor | None, part: slice) -> Tensor:
            piece = replace(packed.part_of(batch, part), entropies=entropies)
            decided = Corrected(corrected.weights[part], corrected.mask[part], corrected.counted[part], {})
            output = self._weighed(inside, piece, decided, token_weights[part])
            packed.merge_into(metrics, output.metrics)
            return output.loss

        return LossOutput(summed(term, logprobs, batch.entropies, parts), metrics)

    def _weighed(self, logprobs: Tensor, batch: MicroBatch, corrected: Corrected, token_weights: Tensor) -> LossOutput:
        mask = corrected.mask
        tokens = Tokens(
            packed.select(logprobs, mask),
            packed.select(batch.advantages.detach(), mask),
            mask,
            packed.Measure(mask),
            batch,
        )
        terms, metrics = self.terms(tokens)
        weights = token_weights.detach().double()
        if self.weighted:
            weights = weights * corrected.weights.detach()
        loss = terms.dot(packed.select(weights, mask))
        if self.config.kl_coef == self.config.entropy_coef == 0:
            return LossOutput(loss, metrics)
        aggregation = packed.select(token_weights.detach(), mask)
        if self.config.kl_coef > 0:
            estimate = kl_estimate(self.config.kl, tokens.logprobs, tokens.family(self.config.kl_to), tokens)
            loss = loss + self.config.kl_coef * estimate.dot(aggregation)
            metrics["loss/kl"] = tokens.measure.mean(estimate)
        if self.config.entropy_coef != 0:
            if batch.entropies is None:
                raise RlcoreError(f"{self.name}: batch.entropies is needed, and this trainer does not give it")
            entropies = packed.select(batch.entropies, mask)
            loss = loss - self.config.entropy_coef * entropies.dot(aggregation)
            metrics["loss/entropy"] = tokens.measure.mean(entropies)
        return LossOutput(loss, metrics)


def kl_estimate(kind: str, logprobs: Tensor, other: Tensor, tokens: Tokens) -> Tensor:
    """``[T]`` estimates of KL(current ‖ other) with gradient, for tokens sampled from the current policy.

    With ``d = logprobs − other``: k1 = d (its gradient has mean 0: it only measures), k2 = d²/2 (the right gradient),
    k3 = exp(min(−d, 20)) − 1 + d (low variance; its gradient is that of the reverse KL), unbiased = ratio to
    ``old_logprobs`` times k3 (value and gradient unbiased for tokens sampled from the old policy). Sources: Schulman
    2020; DeepSeek-V3.2 (2025).
    """
    d = logprobs - other
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    k3 = (-d).clamp(max=packed.LOG_RATIO_CAP).expm1() + d
    return k3 if kind == "k3" else packed.capped_exp(logprobs - tokens.family("old")) * k3


class RatioLoss(PolicyLoss):
    """A loss of the ratio to the policy that is stepped away from."""

    class Config(PolicyLoss.Config):
        """What the ratio is to."""

        ratio_to: Literal["old", "rollout"] = Field(
            "old",
            description="log-probs under the ratio: the trainer's before the step, or the engine's (then no correction "
            "may weigh the same gap again)",
        )

    def ratio(self, tokens: Tokens) -> Tensor:
        """``[T]`` r_t."""
        return packed.capped_exp(tokens.logprobs - tokens.family(self.config.ratio_to))


class PPOClip(RatioLoss):
    """The clipped surrogate, asymmetric, with an optional dual clip.

    Formula: term_t = max(−r_t A_t, −clip(r_t, 1 − clip_low, 1 + clip_high) A_t); with dual_clip = c and A_t < 0:
        min(that, −c A_t)
    Reads: current and old (or rollout) log-probs and advantages, [T].
    Source: Schulman et al. 2017; Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO, clip-higher).
    """

    name = "ppo_clip"

    class Config(RatioLoss.Config):
        """The trust region."""

        clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is clipped below 1 − clip_low")
        clip_high: float = Field(0.28, ge=0, description="the ratio is clipped above 1 + clip_high")
        dual_clip: float | None = Field(None, gt=1, description="bound of the ratio where the advantage is negative")

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The clipped surrogate."""
        return clipped_surrogate(self.ratio(tokens), tokens, self.config)


def clipped_surrogate(ratio: Tensor, tokens: Tokens, config: Any) -> tuple[Tensor, dict[str, Stat]]:
    """The terms of :class:`PPOClip` for a ratio ``[T]`` of any level."""
    advantages = tokens.advantages
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    terms = plain.maximum(clipped)
    bound = clipped > plain
    metrics: dict[str, Stat] = {
        "loss/ratio": tokens.measure.mean(ratio),
        "loss/clip_fraction": tokens.measure.share(bound),
        "loss/clip_low_fraction": tokens.measure.share(bound & (advantages < 0)),
        "loss/clip_high_fraction": tokens.measure.share(bound & (advantages > 0)),
    }
    if config.dual_clip is not None:
        limit = -config.dual_clip * advantages
        above = (advantages < 0) & (terms > limit)
        metrics["loss/dual_clip_fraction"] = tokens.measure.share(above)
        terms = limit.where(above, terms)
    return terms, metrics


class CISPO(RatioLoss):
    """The policy gradient with a clipped, detached ratio: no token loses its gradient.

    Formula: term_t = −sg(clip(r_t, 1 − clip_low, 1 + clip_high)) A_t logprobs_t
    Reads: current and old (or rollout) log-probs and advantages, [T].
    Source: MiniMax-M1 (2025); slime and verl cispo; ScaleRL (2025) for the ceiling.
    """

    name = "cispo"

    class Config(RatioLoss.Config):
        """Bounds of the ratio."""

        clip_low: float = Field(1.0, ge=0, le=1, description="the ratio is clipped below 1 − clip_low; 1: no floor")
        clip_high: float = Field(4.0, ge=0, description="the ratio is clipped above 1 + clip_high")

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The weighted policy gradient."""
        ratio = self.ratio(tokens).detach()
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        metrics: dict[str, Stat] = {
            "loss/ratio": tokens.measure.mean(ratio),
            "loss/clip_fraction": tokens.measure.share(clipped != ratio),
        }
        return -clipped * tokens.advantages * tokens.logprobs, metrics


class SAPO(RatioLoss):
    """A soft gate instead of a clip.

    Formula: term_t = −(4/τ) σ(τ (r_t − 1)) A_t, τ = tau_positive where A_t > 0, else tau_negative
    Reads: current and old (or rollout) log-probs and advantages, [T].
    Source: Gao et al. 2025 (SAPO); verl and TRL sapo.
    """

    name = "sapo"

    class Config(RatioLoss.Config):
        """Temperatures of the gate."""

        tau_positive: float = Field(1.0, gt=0, description="where the advantage is positive")
        tau_negative: float = Field(1.05, gt=0, description="elsewhere; larger damps faster")

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The gated surrogate."""
        ratio, positive = self.ratio(tokens), tokens.advantages > 0
        tau = ratio.new_full((), self.config.tau_negative).where(
            ~positive, ratio.new_full((), self.config.tau_positive)
        )
        gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
        return -gate * tokens.advantages, {"loss/ratio": tokens.measure.mean(ratio)}


class _DPPO(RatioLoss):
    class Config(RatioLoss.Config):
        """The trust region and the bound of the weight."""

        low: float = Field(0.2, ge=0, description="largest divergence of a token that is pushed down further")
        high: float = Field(0.2, ge=0, description="largest divergence of a token that is pushed up further")
        ratio_cap: float = Field(20.0, gt=0, description="ceiling of the ratio")

    def divergence(self, logprobs: Tensor, before: Tensor) -> Tensor:
        raise NotImplementedError

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        config = self.config
        now, before = tokens.logprobs.detach(), tokens.family(config.ratio_to)
        ratio, distance = packed.capped_exp(now - before), self.divergence(now, before)
        up = (tokens.advantages > 0) & (now > before) & (distance > config.high)
        down = (tokens.advantages < 0) & (now < before) & (distance > config.low)
        metrics: dict[str, Stat] = {
            "loss/ratio": tokens.measure.mean(ratio),
            "loss/clip_fraction": tokens.measure.share(up | down),
        }
        terms = -ratio.clamp(max=config.ratio_cap) * tokens.advantages * tokens.logprobs
        return terms.where(~(up | down), terms.new_zeros(())), metrics


class DPPOTV(_DPPO):
    """Masks tokens by the difference of probabilities instead of clipping the ratio.

    Formula: d_t = |exp(logprobs_t) − exp(q_t)|; term_t = 0 if (A_t > 0, r_t > 1, d_t > high) or (A_t < 0, r_t < 1,
        d_t > low), else −sg(min(r_t, ratio_cap)) A_t logprobs_t
    Reads: current and old (or rollout) log-probs and advantages, [T].
    Source: "Rethinking the Trust Region in LLM Reinforcement Learning" 2026 (DPPO, binary TV); verl dppo_tv.
    """

    name = "dppo_tv"

    def divergence(self, logprobs: Tensor, before: Tensor) -> Tensor:
        """|p − q|."""
        return (logprobs.exp() - before.exp()).abs()


class DPPOKL(_DPPO):
    """Masks tokens by a binary KL divergence instead of clipping the ratio.

    Formula: as dppo_tv with d_t = q log(q/p) + (1 − q) log((1 − q)/(1 − p)), p = exp(logprobs_t), q = exp(q_t)
    Reads: current and old (or rollout) log-probs and advantages, [T].
    Source: "Rethinking the Trust Region in LLM Reinforcement Learning" 2026 (DPPO, binary KL); verl dppo_kl.
    """

    name = "dppo_kl"

    class Config(_DPPO.Config):
        """The trust region and the bound of the weight."""

        low: float = Field(0.05, ge=0, description="largest divergence of a token that is pushed down further")
        high: float = Field(0.05, ge=0, description="largest divergence of a token that is pushed up further")

    def divergence(self, logprobs: Tensor, before: Tensor) -> Tensor:
        """KL of the token against the rest."""
        q = before.exp()
        log_rest, log_rest_before = _log1mexp(logprobs), _log1mexp(before)
        return q * (before - logprobs) + (1 - q) * (log_rest_before - log_rest)


def _log1mexp(logprobs: Tensor) -> Tensor:
    """``log(1 − exp(x))`` for ``x ≤ 0``; a probability of 1 counts as 1 − 1e-12."""
    return (-logprobs.clamp(max=-1e-12).expm1()).log()


class Reinforce(PolicyLoss):
    """The plain policy gradient; the correction's weight, or an unclipped ratio, is its only importance weight.

    Formula: term_t = −A_t logprobs_t; with ratio_to: −r_t A_t
    Reads: current log-probs and advantages, [T]; old or rollout log-probs with ratio_to.
    Source: Williams 1992; verl's bypass "reinforce".
    """

    name = "reinforce"

    class Config(PolicyLoss.Config):
        """Whether the ratio weighs."""

        ratio_to: Literal["none", "old", "rollout"] = Field("none", description="log-probs under the ratio, if any")

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """The policy gradient."""
        if self.config.ratio_to == "none":
            return -tokens.advantages * tokens.logprobs, {}
        ratio = packed.capped_exp(tokens.logprobs - tokens.family(self.config.ratio_to))
        return -ratio * tokens.advantages, {"loss/ratio": tokens.measure.mean(ratio)}


class CrossEntropy(PolicyLoss):
    """Imitation of the rows as they are, for warm-up; advantages and correction weights do not matter.

    Formula: term_t = −logprobs_t
    Reads: current log-probs, [T].
    Source: maximum likelihood.
    """

    name = "cross_entropy"
    weighted = False

    def terms(self, tokens: Tokens) -> tuple[Tensor, dict[str, Stat]]:
        """Negative log-likelihood."""
        return -tokens.logprobs, {"loss/nll": tokens.measure.mean(-tokens.logprobs)}
