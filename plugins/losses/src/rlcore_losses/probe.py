"""A first step on five tokens, before a run starts: foreign pieces whose shapes do not fit are found here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlcore.errors import PluginError
from rlcore.types import MicroBatch, Problem

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["preflight", "probe"]

_REMEDY = "repair it, or choose another; the conformance classes of rlcore.testing say what it must keep"


def preflight(config: RunConfig) -> list[Problem]:
    """Problems of an objective that has foreign pieces in it; what this distribution ships is tested already."""
    from importlib.util import find_spec

    from rlcore_losses.chain import own_plugins

    sections = {"correction": config.correction, "loss": config.loss, "aggregation": config.aggregation}
    plugins = own_plugins()
    try:
        offers = {kind: plugins.offer(kind, section.name) for kind, section in sections.items()}
        if all(offer.distribution == "rlcore-losses" for offer in offers.values()) or find_spec("torch") is None:
            return []
        pieces = {kind: plugins.load(kind, section.name)(section.options) for kind, section in sections.items()}
    except PluginError:  # of a module that only this command line named: the run itself will say what is wrong
        return []
    return [
        Problem(f"objective: {kind}", f"{offers[kind]}: {message}", _REMEDY)
        for kind, message in probe(pieces["correction"], pieces["loss"], pieces["aggregation"])
    ]


def probe(correction: Any, loss: Any, aggregation: Any) -> Iterator[tuple[str, str]]:
    """Run the three on two rows of five tokens; gives the kind and what is wrong of the first one that is."""
    import torch

    batch = _batch()
    count = batch.mask.numel()
    kind = "correction"
    try:
        corrected = correction(batch.old_logprobs.clone(), batch)
        for name, dtype in (("weights", torch.float32), ("mask", torch.bool), ("counted", torch.bool)):
            value = getattr(corrected, name)
            if tuple(value.shape) != (count,) or value.dtype != dtype:
                yield kind, f"{name} is {list(value.shape)} {value.dtype}, not [{count}] {dtype}"
                return
        kind = "aggregation"
        weights, denominator = aggregation(corrected.counted, batch)
        if tuple(weights.shape) != (count,) or torch.as_tensor(denominator).numel() != 1:
            shapes = f"{list(weights.shape)} and {list(torch.as_tensor(denominator).shape)}"
            yield kind, f"weights and denominator are {shapes}, not [{count}] and one number"
            return
        kind = "loss"
        logprobs = batch.old_logprobs.clone().requires_grad_()
        value = loss(logprobs, batch, corrected, weights).loss
        if tuple(value.shape) != ():
            yield kind, f"the loss is {list(value.shape)}, not one number: terms are weighted and summed"
            return
        value.backward()
        if not bool(value.isfinite()) or logprobs.grad is None or not bool(logprobs.grad.isfinite().all()):
            yield kind, "loss or gradient is not finite on five ordinary tokens"
    except Exception as error:  # noqa: BLE001 - whatever a foreign piece raises is what is wrong with it
        yield kind, f"{type(error).__name__}: {error}"


def _batch() -> MicroBatch:
    import torch

    mask = torch.tensor([False, True, True, False, True])
    old = torch.tensor([-1.0, -0.5, -2.0, -1.0, -0.1])
    zeros = torch.zeros(5, dtype=torch.int32)
    return MicroBatch(
        token_ids=zeros.long(),
        mask=mask,
        rollout_logprobs=(old + 0.1).where(mask, torch.tensor(float("nan"))),
        advantages=torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0]),
        turn_ids=zeros.where(mask, zeros - 1),
        versions=zeros.where(mask, zeros - 1),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        row_groups=torch.tensor([0, 0], dtype=torch.int32),
        row_trajectories=torch.tensor([0, 1], dtype=torch.int32),
        old_logprobs=old,
        ref_logprobs=old - 0.1,
        entropies=torch.ones(5),
    )
