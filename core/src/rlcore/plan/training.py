"""What one training rank holds: weights, gradients, optimizer state, activations, by pipeline stage.

Bytes per parameter follow Megatron-Core's distributed optimizer: bf16 weights (2), float32 gradients (4), and per
parameter of the shard float32 master weights and two Adam moments (12). Expert parameters are sharded over expert- and
expert-tensor-parallel ranks and replicated over what is left; the others over tensor-parallel ranks, except those that
tensor parallelism duplicates (norms, routers, indexers, the down projections of latent attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlcore.errors import ConfigError
from rlcore.plan.shapes import Shapes

__all__ = ["ADAM_BYTES", "Layout", "Stage", "index_share_starts", "problems", "stages"]

WEIGHT_BYTES, GRADIENT_BYTES, ADAM_BYTES = 2, 4, 12
ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """How training is spread over GPUs.

    Attributes:
        gpus: all training GPUs.
        tp: tensor parallel (with sequence parallel). pp: pipeline. cp: context. ep: expert. etp: expert tensor.
        split: decoder layers of each pipeline stage; empty: as even as can be.
        sequence: longest row in tokens.
        micro_tokens: tokens of a micro-batch per GPU.
        logprob_chunk: positions whose logits exist at one time.
        recompute: ``full`` keeps a layer's input only; ``none`` keeps everything inside it.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    split: tuple[int, ...] = ()
    sequence: int = 65536
    micro_tokens: int = 8192
    logprob_chunk: int = 16384
    recompute: str = "full"

    @property
    def dp(self) -> int:
        """Data-parallel copies."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of the longest row on one context-parallel rank."""
        return -(-self.sequence // self.cp)

    def layers(self, total: int) -> tuple[int, ...]:
        """Layers of each stage."""
        if self.split:
            return self.split
        each, more = divmod(total, self.pp)
        return tuple(each + (stage >= self.pp - more) for stage in range(self.pp))


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage, per rank, in bytes; counts in elements.

    Attributes:
        first, last: its decoder layers, counted from 1, both included.
        parameters: of the whole stage.
        logits: one chunk of float32 logits (last stage).
        buffers: send and receive buffers of experts' all-to-all and the pipeline.
    """

    index: int
    first: int
    last: int
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def resident(self) -> float:
        """Bytes that stay on the GPU if the optimizer state is streamed elsewhere."""
        return self.weights + self.gradients + self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        """Bytes with the optimizer state on the GPU."""
        return self.resident + self.optimizer


def stages(shapes: Shapes, layout: Layout) -> list[Stage]:
    """What a rank of each stage holds. Call :func:`problems` first: a layout that divides nothing gives nonsense."""
    found: list[Stage] = []
    start = 0
    for index, count in enumerate(layout.layers(shapes.layers)):
        sharded = replicated = experts = 0
        for layer in range(start, start + count):
            s, r, e = _layer_parts(shapes, layer)
            sharded, replicated, experts = sharded + s, replicated + r, experts + e
        table = shapes.vocabulary * shapes.hidden
        if index == 0:
            sharded += table
        if index == layout.pp - 1:
            sharded += 0 if shapes.tied and layout.pp == 1 else table
            replicated += shapes.hidden
        dense_rank = sharded / layout.tp + replicated
        expert_rank = experts / (layout.ep * layout.etp)
        optimizer = ADAM_BYTES * (
            sharded / layout.tp / (layout.dp * layout.cp)
            + replicated / (layout.dp * layout.cp)
            + expert_rank / max(1, layout.edp)
        )
        found.append(
            Stage(
                index=index,
                first=start + 1,
                last=start + count,
                parameters=sharded + replicated + experts,
                weights=WEIGHT_BYTES * (dense_rank + expert_rank),
                gradients=GRADIENT_BYTES * (dense_rank + expert_rank),
                optimizer=optimizer,
                activations=_activations(shapes, layout, count, index),
                logits=4.0 * min(layout.logprob_chunk, _local(layout)) * shapes.vocabulary / layout.tp
                if index == layout.pp - 1
                else 0.0,
                buffers=_buffers(shapes, layout),
            )
        )
        start += count
    return found


def problems(shapes: Shapes, layout: Layout, gpus_per_node: int = 8) -> Iterator[str]:
    """Everything that makes a layout impossible, in words; nothing if it can run."""
    for name in ("gpus", "tp", "pp", "cp", "ep", "etp"):
        if getattr(layout, name) < 1:
            yield f"{name} is {getattr(layout, name)}, at least 1 is needed"
            return
    block = layout.tp * layout.pp * layout.cp
    if layout.gpus % block:
        yield f"TP {layout.tp} × PP {layout.pp} × CP {layout.cp} = {block} does not divide {layout.gpus} GPUs"
        return
    if shapes.heads % layout.tp:
        yield f"TP {layout.tp} does not divide {shapes.heads} heads"
    if not shapes.latent and shapes.kv_heads % layout.tp and layout.tp % shapes.kv_heads:
        yield f"TP {layout.tp} and {shapes.kv_heads} KV heads do not divide each other"
    if layout.sequence % layout.cp or (layout.cp > 1 and layout.sequence % (2 * layout.cp)):
        yield f"a sequence of {layout.sequence} tokens does not divide into 2 × CP {layout.cp} parts"
    if layout.tp > gpus_per_node:
        yield f"TP {layout.tp} crosses the {gpus_per_node} GPUs of a node"
    if not shapes.experts and (layout.ep > 1 or layout.etp > 1):
        yield "a model without experts has no expert parallelism: EP and expert TP must be 1"
    if shapes.experts:
        if shapes.experts % layout.ep:
            yield f"EP {layout.ep} does not divide {shapes.experts} experts"
        if (layout.gpus // layout.pp) % (layout.ep * layout.etp):
            yield f"EP {layout.ep} × expert TP {layout.etp} does not divide the {layout.gpus // layout.pp} ranks of a stage"
    yield from _split_problems(shapes, layout)


def index_share_starts(shapes: Shapes) -> list[int]:
    """Layers, counted from 1, at which a pipeline stage may start when layers share an indexer's choice.

    A layer without an indexer needs the choice of the last one before it, on its own stage.
    """
    if not shapes.shares_indexers or not shapes.indexers:
        return list(range(1, shapes.layers + 1))
    return [layer + 1 for layer in shapes.indexers]


def _split_problems(shapes: Shapes, layout: Layout) -> Iterator[str]:
    split = layout.layers(shapes.layers)
    if len(split) != layout.pp:
        yield f"the split {_say(split)} has {len(split)} stages, PP is {layout.pp}"
        return
    if sum(split) != shapes.layers:
        yield f"the split {_say(split)} has {sum(split)} layers, the model {shapes.layers}"
    if min(split) < 1:
        yield f"the split {_say(split)} has a stage without layers"
    if shapes.experts and split[0] < shapes.dense_layers:
        yield f"the first stage has {split[0]} layers, fewer than the {shapes.dense_layers} dense ones at the start"
    allowed = set(index_share_starts(shapes))
    start = 1
    for index, count in enumerate(split):
        if start not in allowed:
            yield (
                f"stage {index + 1} starts at layer {start}, which takes its sparse-attention choice from an indexer of "
                f"the stage before (IndexShare): start at one of {_say(sorted(allowed)[:6])}, …"
            )
        start += count


def _layer_parts(shapes: Shapes, layer: int) -> tuple[int, int, int]:
    """Elements of a layer: split by tensor parallelism, duplicated by it, and routed experts."""
    replicated = 2 * shapes.hidden + (shapes.indexer if layer in shapes.indexers else 0)
    sharded = shapes.attention
    if shapes.latent:
        down = shapes.hidden * (shapes.q_lora + shapes.kv_lora + shapes.qk_rope) + shapes.q_lora + shapes.kv_lora
        sharded, replicated = sharded - down, replicated + down
    if not shapes.has_experts(layer):
        return sharded + 3 * shapes.hidden * shapes.ffn, replicated, 0
    return (
        sharded + shapes.shared_experts * shapes.expert,
        replicated + shapes.router,
        shapes.experts * shapes.expert,
    )


def _local(layout: Layout) -> int:
    """Tokens of one micro-batch on one rank: never less than its part of the longest row."""
    return max(layout.micro_tokens, layout.tokens_per_rank)


def _activations(shapes: Shapes, layout: Layout, layers: int, stage: int) -> float:
    """Activations at the peak of the 1F1B schedule, in which stage s keeps ``pp − s`` micro-batches."""
    tokens = _local(layout)
    token = shapes.hidden * ACTIVATION_BYTES / layout.tp
    inside = tokens * _inside_layer(shapes, layout)
    kept = layout.pp - stage
    if layout.recompute == "full":
        return kept * layers * tokens * token + inside
    return kept * layers * inside


def _inside_layer(shapes: Shapes, layout: Layout) -> float:
    """Bytes per token that a layer keeps between forward and backward (flash attention: no score matrix)."""
    per_head = shapes.head_dim + (shapes.v_dim or shapes.head_dim)
    attention = shapes.heads * 2 * per_head / layout.tp
    if shapes.experts:
        width = shapes.experts_per_token / layout.etp * (2 * shapes.hidden + 3 * shapes.expert_ffn)
        width += shapes.shared_experts * 3 * shapes.expert_ffn / layout.tp
    else:
        width = 3 * shapes.ffn / layout.tp
    return (attention + width + 4 * shapes.hidden / layout.tp) * ACTIVATION_BYTES


def _buffers(shapes: Shapes, layout: Layout) -> float:
    """All-to-all buffers of experts, in and out, and the pipeline's two edges."""
    tokens = _local(layout)
    dispatch = (
        2 * tokens * shapes.experts_per_token * shapes.hidden * ACTIVATION_BYTES / layout.tp if layout.ep > 1 else 0
    )
    edges = 2 * tokens * shapes.hidden * ACTIVATION_BYTES / layout.tp if layout.pp > 1 else 0
    return float(dispatch + edges)


def _say(numbers: Sequence[int]) -> str:
    return "-".join(map(str, numbers))


def check(shapes: Shapes, layout: Layout, gpus_per_node: int = 8) -> None:
    """Raise ``ConfigError`` with every problem of a layout."""
    found = list(problems(shapes, layout, gpus_per_node))
    if found:
        raise ConfigError("layout: " + "; ".join(found))
