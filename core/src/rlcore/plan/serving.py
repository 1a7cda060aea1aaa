"""What one inference rank holds: weights and the key-value cache, and how fast it decodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlcore.plan.hardware import Gpu
from rlcore.plan.shapes import Shapes

__all__ = [
    "KvCell",
    "Serving",
    "decode_tokens_per_second",
    "kv_cell",
    "kv_tokens",
    "kv_tokens_per_rank",
    "serving_problems",
    "weight_bytes",
]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvCell:
    """Bytes of one token's key-value cache in one layer, by part."""

    parts: tuple[tuple[str, int], ...]
    layers: int

    @property
    def per_layer(self) -> int:
        """Bytes in one layer."""
        return sum(size for _, size in self.parts)

    @property
    def per_token(self) -> int:
        """Bytes in all layers."""
        return self.per_layer * self.layers


@dataclass(frozen=True, slots=True)
class Serving:
    """How one engine is spread over its GPUs.

    Attributes:
        engines: engines; each is ``gpus`` GPUs.
        gpus: GPUs of one engine.
        ep: expert parallel.
        dp_attention: ranks that each hold the whole attention and a cache of their own; 1: tensor parallel attention.
        weight_bits: of expert and dense weights.
        kv_bits: 8 or 16.
        kv_scales: of an 8-bit latent cache: whether it is kept with a float32 scale per 128 values and its rotary key in
            16 bits (788 bytes a cell of GLM-5.2), or all in 8 bits without scales (708).
        cell_bytes: bytes of a token and layer, where they are known otherwise; 0: as derived.
        memory_fraction: share of the usable memory for weights, buffers and cache together.
        buffers_gib: buffers, graphs and workspaces that are neither weights nor cache, in GiB; an assumption.
        mtp: whether the prediction layer is loaded (speculative decoding) and cached.
    """

    engines: int = 1
    gpus: int = 4
    ep: int = 4
    dp_attention: int = 4
    weight_bits: int = 8
    kv_bits: int = 8
    kv_scales: bool = False
    cell_bytes: int = 0
    memory_fraction: float = 0.85
    buffers_gib: float = 8.0
    mtp: bool = True


def kv_cell(shapes: Shapes, serving: Serving) -> KvCell:
    """The cache of one token and layer.

    Grouped-query attention: keys and values of every KV head of the rank. Latent attention: the compressed vector and the
    rotary key, whole on every rank. Sparse attention adds the indexer's key with its scale, in every layer.
    """
    size = serving.kv_bits // 8
    layers = shapes.layers + (shapes.mtp_layers if serving.mtp else 0)
    if serving.cell_bytes:
        return KvCell((("given", serving.cell_bytes),), layers)
    if not shapes.latent:
        heads = max(1, shapes.kv_heads * serving.dp_attention // serving.gpus)
        return KvCell((("keys", heads * shapes.head_dim * size), ("values", heads * shapes.head_dim * size)), layers)
    parts: list[tuple[str, int]] = [("latent", shapes.kv_lora * size)]
    if serving.kv_scales and size == 1:
        parts += [("scales", shapes.kv_lora // 128 * 4), ("rotary key", shapes.qk_rope * 2)]
    else:
        parts += [("rotary key", shapes.qk_rope * size)]
    if shapes.index_heads:
        parts += [("indexer key", shapes.index_dim), ("indexer scale", 4)]
    return KvCell(tuple(parts), layers)


def weight_bytes(shapes: Shapes, serving: Serving) -> float:
    """Bytes of weights on one rank: experts over EP, the rest whole with data-parallel attention, else over the GPUs.

    Embedding, head, routers and norms stay in 16 bits.
    """
    experts = shapes.moe_layers * shapes.experts * shapes.expert
    mtp = shapes.mtp if serving.mtp else 0
    wide = shapes.vocabulary * shapes.hidden * (1 if shapes.tied else 2) + shapes.moe_layers * shapes.router
    rest = shapes.total - experts - wide
    spread = serving.gpus // serving.dp_attention
    byte = serving.weight_bits / 8
    return experts * byte / serving.ep + mtp * byte / serving.ep + rest * byte / spread + wide * 2 / serving.gpus


def kv_tokens(usable_gib: float, fraction: float, static_gib: float, cell: KvCell) -> int:
    """Tokens that fit: ``(usable × fraction − weights and buffers) / bytes per token``; never negative."""
    return max(0, int((usable_gib * fraction - static_gib) * GIB // cell.per_token))


def kv_tokens_per_rank(shapes: Shapes, serving: Serving, gpu: Gpu) -> int:
    """:func:`kv_tokens` of one rank."""
    static = weight_bytes(shapes, serving) / GIB + serving.buffers_gib
    return kv_tokens(gpu.memory_gib, serving.memory_fraction, static, kv_cell(shapes, serving))


def serving_problems(shapes: Shapes, serving: Serving, gpu: Gpu, sequence: int) -> Iterator[str]:
    """Everything that makes an engine impossible, in words; nothing if it can run."""
    for name in ("gpus", "ep", "dp_attention"):
        if getattr(serving, name) < 1:
            yield f"{name} is {getattr(serving, name)}, at least 1 is needed"
            return
    if serving.gpus % serving.dp_attention:
        yield f"data-parallel attention {serving.dp_attention} does not divide the {serving.gpus} GPUs of an engine"
        return
    tp = serving.gpus // serving.dp_attention
    if shapes.heads % tp:
        yield f"attention over {tp} GPUs does not divide {shapes.heads} heads"
    if serving.ep > 1 and (not shapes.experts or shapes.experts % serving.ep):
        yield f"EP {serving.ep} does not divide {shapes.experts} experts"
    if serving.gpus % serving.ep:
        yield f"EP {serving.ep} does not divide the {serving.gpus} GPUs of an engine"
    tokens = kv_tokens_per_rank(shapes, serving, gpu)
    if tokens < sequence:
        held = weight_bytes(shapes, serving) / GIB
        yield (
            f"the cache of one rank holds {tokens:,} tokens, fewer than one sequence of {sequence:,}: weights "
            f"{held:.1f} GiB + buffers {serving.buffers_gib:.1f} GiB of "
            f"{gpu.memory_gib * serving.memory_fraction:.1f} GiB ({serving.memory_fraction:.2f} of {gpu.memory_gib})"
        )


def decode_tokens_per_second(
    shapes: Shapes,
    serving: Serving,
    gpu: Gpu,
    running: float,
    context: float,
    *,
    efficiency: float,
    layer_latency_us: float,
    accepted: float,
) -> float:
    """Tokens per second of one engine that decodes ``running`` sequences of ``context`` tokens.

    One pass reads the weights it touches and the caches of its sequences at ``efficiency`` of the memory bandwidth, and
    waits ``layer_latency_us`` a layer; it gives ``accepted`` tokens a sequence.
    """
    experts = shapes.moe_layers * shapes.experts * shapes.expert * serving.weight_bits / 8 / serving.ep
    touched = 1 - (1 - shapes.experts_per_token / shapes.experts) ** running if shapes.experts else 0.0
    weights = weight_bytes(shapes, serving) - experts * (1 - touched)
    read = min(context, shapes.index_topk) if shapes.index_heads else context
    cell = kv_cell(shapes, serving)
    caches = running / serving.dp_attention * read * cell.per_token
    if shapes.index_heads:
        indexed = shapes.index_dim + 4
        caches = (
            running
            / serving.dp_attention
            * cell.layers
            * (read * max(0, cell.per_layer - indexed) + context * indexed * len(shapes.indexers) / shapes.layers)
        )
    seconds = (weights + caches) / (gpu.memory_gb_s * 1e9 * efficiency) + layer_latency_us * 1e-6 * shapes.layers
    return running * accepted / seconds
