"""How long a step takes: a sum of parts, each with the assumptions that it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rlcore.plan.hardware import Gpu
from rlcore.plan.serving import GIB, Serving, decode_tokens_per_second, kv_tokens_per_rank
from rlcore.plan.shapes import Shapes
from rlcore.plan.training import Layout, Stage

__all__ = ["Part", "StepTime", "Workload", "assumptions", "fits", "step_time", "training_parts"]

HEADROOM = 0.92
"""Share of a GPU's usable memory that a plan fills: the rest is fragmentation, collectives and kernels."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step does, and what is assumed about the hardware at work.

    Attributes:
        rows: trajectories that are trained in one step.
        row_tokens: mean tokens of one, prompts and observations included.
        sampled_tokens: mean sampled tokens of one.
        in_flight: attempts at the same time.
        episode_seconds: mean wall clock of an attempt, commands and grading included; 0: sampling alone.
        overlap: rollout and training at the same time (asynchronous).
        old_logprobs: whether a forward over the batch comes before the step.
        mfu: share of the bf16 peak that a busy GPU reaches in training, without pipeline bubbles.
        link_efficiency: share of the bandwidth that collectives reach.
        disk_gb_s: of a node, GB (1e9 bytes) per second, reading or writing, for streamed optimizer state.
        decode_efficiency: share of the memory bandwidth that decoding reaches.
        layer_latency_us: microseconds of a decoder layer that no bandwidth explains (kernels, all-to-all).
        accepted: tokens of one decoding pass per sequence (speculative decoding: above 1).
        eval_every: steps between evaluations; 0: none.
        eval_seconds: wall clock of an evaluation, bounded by its slowest attempt.
        bucket_gib: size of a bucket of the weight broadcast, in GiB.
    """

    rows: int = 64
    row_tokens: int = 16384
    sampled_tokens: int = 4096
    in_flight: int = 128
    episode_seconds: float = 0.0
    overlap: bool = True
    old_logprobs: bool = True
    mfu: float = 0.2
    link_efficiency: float = 0.6
    disk_gb_s: float = 12.0
    decode_efficiency: float = 0.4
    layer_latency_us: float = 60.0
    accepted: float = 1.0
    eval_every: int = 0
    eval_seconds: float = 3600.0
    bucket_gib: float = 2.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step: seconds, and how they come about."""

    name: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        training: parts of the trainer's side, one after the other.
        rollout: the slowest bound on making ``rows`` attempts.
        sync: publishing weights, while generation is paused.
        evaluation: an evaluation's wall clock spread over the steps between two.
    """

    training: tuple[Part, ...]
    rollout: Part
    sync: Part
    evaluation: Part
    overlap: bool

    @property
    def training_seconds(self) -> float:
        """Of all parts of training."""
        return sum(part.seconds for part in self.training)

    @property
    def seconds(self) -> float:
        """Without evaluation: what takes longer if both go on at once, else both; then the weights."""
        both = (self.training_seconds, self.rollout.seconds)
        return (max(both) if self.overlap else sum(both)) + self.sync.seconds

    @property
    def seconds_with_evaluation(self) -> float:
        """Spread over all steps, if evaluations block."""
        return self.seconds + self.evaluation.seconds


def fits(found: list[Stage], gpu: Gpu) -> str:
    """``on the GPU``, ``streamed`` (optimizer state on local disk or in host memory) or ``no``."""
    room = gpu.memory_gib * GIB * HEADROOM
    if max(stage.total for stage in found) <= room:
        return "on the GPU"
    return "streamed" if max(stage.resident for stage in found) <= room else "no"


def training_parts(
    shapes: Shapes, layout: Layout, found: list[Stage], gpu: Gpu, work: Workload, gpus_per_node: int
) -> tuple[Part, ...]:
    """The parts of training a batch of ``work.rows`` rows."""
    tokens = work.rows * work.row_tokens
    passes = 3 + (layout.recompute == "full") + work.old_logprobs
    table = shapes.vocabulary * shapes.hidden
    matrix = 2.0 * (shapes.active - (0 if shapes.tied else table))
    flops = tokens * passes * (matrix + _attention_flops(shapes, work.row_tokens))
    micro = max(1, ceil(tokens / (layout.dp * layout.cp * layout.micro_tokens)))
    bubble = (layout.pp - 1) / (micro + layout.pp - 1)
    compute = flops / (layout.gpus * gpu.bf16_tflops * 1e12 * work.mfu) / (1 - bubble)
    parts = [
        Part(
            "compute",
            compute,
            f"{flops:.3g} operations = {tokens:,} tokens × {passes} forward-equivalents × "
            f"{flops / tokens / passes:.3g} at {work.mfu:.0%} of {gpu.bf16_tflops:.0f} TFLOP/s; "
            f"pipeline bubble {bubble:.0%} at {micro} micro-batches",
        )
    ]
    per_rank = tokens / (layout.dp * layout.cp)
    rounds = passes + 1
    layers = shapes.layers / layout.pp
    if layout.tp > 1:
        sent = per_rank * layers * rounds * 2 * 2 * shapes.hidden * 2 * (layout.tp - 1) / layout.tp
        parts.append(_sent("tensor parallel", sent, gpu.link_gb_s, work, "gather and scatter of each layer, twice"))
    if layout.ep > 1:
        inside = layout.ep * layout.etp <= gpus_per_node
        moe = shapes.moe_layers / layout.pp
        sent = per_rank / layout.tp * moe * rounds * 2 * shapes.experts_per_token * shapes.hidden * 2
        sent *= (layout.ep - 1) / layout.ep
        rate = gpu.link_gb_s if inside else gpu.fabric_gb_s
        where = "inside a node" if inside else "between nodes"
        parts.append(_sent("expert parallel", sent, rate, work, f"dispatch and combine of each expert layer {where}"))
    gradients = max(stage.gradients for stage in found)
    if layout.dp * layout.cp > 1:
        why = "gradients reduced and weights gathered over data and context parallel ranks"
        parts.append(_sent("gradients", 1.5 * gradients, gpu.fabric_gb_s, work, why))
    if fits(found, gpu) == "streamed":
        state = max(stage.optimizer for stage in found)
        seconds = 2 * state * gpus_per_node / (work.disk_gb_s * 1e9)
        why = (
            f"{state / 1e9:.0f} GB (1e9 bytes) of a rank read and written, {gpus_per_node} ranks share "
            f"{work.disk_gb_s:.0f} GB/s of a node"
        )
        parts.append(Part("optimizer stream", seconds, why))
    return tuple(parts)


def step_time(
    shapes: Shapes,
    layout: Layout,
    found: list[Stage],
    serving: Serving | None,
    gpu: Gpu,
    work: Workload,
    gpus_per_node: int,
) -> StepTime:
    """The whole step. ``serving=None``: recorded attempts are replayed, nothing is sampled."""
    evaluation = Part("evaluation", 0.0, "off")
    if work.eval_every:
        why = f"{work.eval_seconds:.0f} s (its slowest attempt) every {work.eval_every} steps, if it blocks"
        evaluation = Part("evaluation", work.eval_seconds / work.eval_every, why)
    training = training_parts(shapes, layout, found, gpu, work, gpus_per_node)
    if serving is None:
        nothing = Part("rollout", 0.0, "recorded attempts are replayed")
        return StepTime(training, nothing, Part("weights", 0.0, "no engine takes them"), evaluation, work.overlap)
    return StepTime(training, _rollout(shapes, serving, gpu, work), _sync(shapes, gpu, work), evaluation, work.overlap)


def assumptions(work: Workload, gpu: Gpu) -> Iterator[tuple[str, str]]:
    """Every assumption that no shape gives: name, and value with its unit."""
    yield "rows of a step", f"{work.rows} × {work.row_tokens:,} tokens, {work.sampled_tokens:,} of them sampled"
    yield "attempts in flight", str(work.in_flight)
    yield "mean attempt", f"{work.episode_seconds:.0f} s" if work.episode_seconds else "bounded by sampling alone"
    yield "training", f"{work.mfu:.0%} of {gpu.bf16_tflops:.0f} TFLOP/s (dense bf16 peak of {gpu.name})"
    yield (
        "links",
        f"{work.link_efficiency:.0%} of {gpu.link_gb_s:.0f} GB/s in a node, of {gpu.fabric_gb_s:.0f} GB/s between nodes",
    )
    yield "local disk", f"{work.disk_gb_s:.0f} GB/s (1e9 bytes) of a node, one direction at a time"
    waits = f"{work.layer_latency_us:.0f} µs a layer, {work.accepted:.2f} tokens a pass and sequence"
    yield "decoding", f"{work.decode_efficiency:.0%} of {gpu.memory_gb_s:.0f} GB/s, {waits}"
    yield "memory", f"{HEADROOM:.0%} of {gpu.memory_gib} GiB of a GPU is filled at most in training"


def _rollout(shapes: Shapes, serving: Serving, gpu: Gpu, work: Workload) -> Part:
    running = work.in_flight / serving.engines
    rate = decode_tokens_per_second(
        shapes,
        serving,
        gpu,
        running,
        work.row_tokens / 2,
        efficiency=work.decode_efficiency,
        layer_latency_us=work.layer_latency_us,
        accepted=work.accepted,
    )
    sampling = work.rows * work.sampled_tokens / (rate * serving.engines)
    waiting = work.rows * work.episode_seconds / work.in_flight
    tokens = kv_tokens_per_rank(shapes, serving, gpu) * serving.engines * serving.dp_attention
    held = min(1.0, tokens / (work.in_flight * work.row_tokens)) if tokens else 0.0
    note = "" if held >= 1 else f"; the caches hold only {held:.0%} of what is in flight"
    if waiting >= sampling:
        why = f"{work.rows} × {work.episode_seconds:.0f} s of an attempt / {work.in_flight} in flight"
        return Part("rollout", waiting, why + f" (sampling alone: {sampling:.0f} s){note}")
    why = f"{work.rows * work.sampled_tokens:,} tokens at {rate:.0f} tokens/s of each of {serving.engines} engines"
    return Part("rollout", sampling, why + note)


def _sync(shapes: Shapes, gpu: Gpu, work: Workload) -> Part:
    sent = 2.0 * shapes.total
    buckets = ceil(sent / (work.bucket_gib * GIB))
    seconds = sent / (gpu.fabric_gb_s * 1e9 * work.link_efficiency)
    return Part("weights", seconds, f"{sent / 1e9:.0f} GB (1e9 bytes, bf16) to every engine in {buckets} buckets")


def _sent(name: str, sent: float, rate: float, work: Workload, why: str) -> Part:
    seconds = sent / (rate * 1e9 * work.link_efficiency)
    return Part(name, seconds, f"{why}: {sent / 1e9:.0f} GB (1e9 bytes) a rank at {rate:.0f} GB/s, not overlapped")


def _attention_flops(shapes: Shapes, row: int) -> float:
    """Operations of one token's attention in all layers, causal, sparse where the model is."""
    context = min(row / 2, shapes.index_topk) if shapes.index_heads else row / 2
    inner = shapes.head_dim + (shapes.v_dim or shapes.head_dim)
    indexer = 2.0 * shapes.index_heads * shapes.index_dim * row / 2 * len(shapes.indexers)
    return shapes.layers * 2.0 * shapes.heads * inner * context + indexer
