"""What one inference rank holds: weights and the key-value cache."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.plan.shapes import Shapes

__all__ = ["KvCell", "Serving", "kv_cell", "kv_tokens", "weight_bytes"]

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
        gpus: GPUs of one engine.
        ep: expert parallel.
        dp_attention: ranks that each hold the whole attention and a cache of their own; 1: tensor parallel attention.
        weight_bits: of expert and dense weights.
        kv_bits: 8 or 16.
        memory_fraction: share of the usable memory for weights, buffers and cache together.
        mtp: whether the prediction layer is loaded (speculative decoding) and cached.
    """

    gpus: int = 4
    ep: int = 4
    dp_attention: int = 4
    weight_bits: int = 8
    kv_bits: int = 8
    memory_fraction: float = 0.85
    mtp: bool = True


def kv_cell(shapes: Shapes, serving: Serving) -> KvCell:
    """The cache of one token and layer.

    Grouped-query attention: keys and values of every KV head. Latent attention: the compressed vector and the rotary
    key. Sparse attention adds the indexer's key with its scale.
    """
    size = serving.kv_bits // 8
    layers = shapes.layers + (shapes.mtp_layers if serving.mtp else 0)
    if not shapes.latent:
        heads = max(1, shapes.kv_heads * serving.dp_attention // serving.gpus)
        return KvCell((("keys", heads * shapes.head_dim * size), ("values", heads * shapes.head_dim * size)), layers)
    parts = [("latent", shapes.kv_lora * size), ("rotary key", shapes.qk_rope * size)]
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
