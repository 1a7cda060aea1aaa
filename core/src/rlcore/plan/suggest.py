"""Search for layouts: what fits, best first, and why each class of the others does not."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import log

from rlcore.plan.hardware import Gpu
from rlcore.plan.serving import GIB
from rlcore.plan.shapes import Shapes
from rlcore.plan.steps import HEADROOM, Workload, fits, training_parts
from rlcore.plan.training import Layout, Stage, index_share_starts, problems, stages

__all__ = ["Candidate", "Rejected", "Suggestions", "balanced_split", "suggest"]

NOISE = 0.05
"""Estimates this close count as equal; then the layout with the most room comes first."""
DEGREES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits.

    Attributes:
        state: where the optimizer state is: ``on the GPU`` or ``streamed``.
        peak_gib: of the fullest rank, in GiB (2^30 bytes), with the optimizer state if it is on the GPU.
        seconds: estimated time of training a batch.
    """

    layout: Layout
    state: str
    peak_gib: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """A class of layouts that do not work: the reason with its figures left out, how many, and one of them in full."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What a search found."""

    fitting: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]


def suggest(shapes: Shapes, base: Layout, gpu: Gpu, work: Workload, gpus_per_node: int) -> Suggestions:
    """Every power-of-two layout of ``base.gpus`` GPUs; sequence, micro-batch and recompute as in ``base``."""
    fitting: list[Candidate] = []
    reasons: dict[str, tuple[int, str]] = {}
    for layout in _layouts(shapes, base):
        wrong = list(problems(shapes, layout, gpus_per_node))
        if not wrong:
            found = stages(shapes, layout)
            state = fits(found, gpu)
            if state != "no":
                peak = max(stage.total if state == "on the GPU" else stage.resident for stage in found) / GIB
                parts = training_parts(shapes, layout, found, gpu, work, gpus_per_node)
                fitting.append(Candidate(layout, state, peak, sum(part.seconds for part in parts)))
                continue
            wrong = [_too_large(max(found, key=lambda stage: stage.resident), gpu)]
        for reason in wrong[:1]:
            count, example = reasons.get(_class_of(reason), (0, f"{say(layout)}: {reason}"))
            reasons[_class_of(reason)] = (count + 1, example)
    fitting.sort(key=lambda c: (round(log(c.seconds) / log(1 + NOISE)), c.peak_gib))
    rejected = [Rejected(reason, count, example) for reason, (count, example) in reasons.items()]
    return Suggestions(tuple(fitting), tuple(sorted(rejected, key=lambda r: -r.count)))


def say(layout: Layout) -> str:
    """A layout in a line."""
    text = f"TP {layout.tp} PP {layout.pp} CP {layout.cp} EP {layout.ep}"
    return text + (f" ETP {layout.etp}" if layout.etp > 1 else "") + (f" DP {layout.dp}" if layout.dp else "")


def balanced_split(shapes: Shapes, pp: int) -> tuple[int, ...]:
    """Layers of each stage with the smallest largest stage, starting only where a stage may; empty: there is none.

    Exact, by dynamic programming over the allowed starts.
    """
    depth = shapes.layers
    if pp == 1:
        return (depth,)
    starts = [s - 1 for s in index_share_starts(shapes) if shapes.dense_layers <= s - 1 or not shapes.experts]
    starts = sorted({0, *starts})
    sums = [0]
    for layer in range(depth):
        sums.append(sums[-1] + shapes.layer(layer))
    table = shapes.vocabulary * shapes.hidden

    def weight(first: int, end: int) -> int:
        return sums[end] - sums[first] + (table if first == 0 else 0) + (table if end == depth else 0)

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return float(weight(first, depth)), (depth - first,)
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for end in starts[bisect_right(starts, first) :]:
            if depth - end < left - 1:
                break
            own = float(weight(first, end))
            if own >= found[0]:
                break
            rest, split = best(end, left - 1)
            if split and max(own, rest) < found[0]:
                found = (max(own, rest), (end - first, *split))
        return found

    return best(0, pp)[1]


def _layouts(shapes: Shapes, base: Layout) -> Iterator[Layout]:
    experts = DEGREES if shapes.experts else (1,)
    for pp in DEGREES[:5]:
        if pp > min(base.gpus, shapes.layers):
            continue
        split = balanced_split(shapes, pp)
        for tp in DEGREES[:5]:
            for cp in DEGREES[:5]:
                for ep in experts:
                    if tp * pp * cp <= base.gpus and ep * pp <= base.gpus:
                        yield replace(base, tp=tp, pp=pp, cp=cp, ep=ep, etp=1, split=split)


def _too_large(stage: Stage, gpu: Gpu) -> str:
    room = gpu.memory_gib * HEADROOM
    parts = {
        "weights": stage.weights,
        "gradients": stage.gradients,
        "activations": stage.activations,
        "logits": stage.logits,
        "buffers": stage.buffers,
    }
    largest = max(parts, key=lambda name: parts[name])
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return (
        f"too large even with the optimizer state streamed, mostly {largest}: stage {stage.index + 1} needs "
        f"{stage.resident / GIB:.1f} GiB of {room:.1f} GiB ({shown})"
    )


def _class_of(reason: str) -> str:
    """A reason without its figures."""
    return re.sub(r"\d[\d.,]*", "…", reason.partition(":")[0])
