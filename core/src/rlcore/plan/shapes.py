"""Parameters of a model from its Hugging Face configuration: dense, MoE, latent attention (MLA), sparse attention (DSA).

The counts are exact: they equal the elements of the published checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError

__all__ = ["Component", "Shapes"]


@dataclass(frozen=True, slots=True)
class Component:
    """Some parameters of the model: ``count`` copies of ``each`` elements."""

    name: str
    count: int
    each: int

    @property
    def total(self) -> int:
        """Elements in all copies."""
        return self.count * self.each


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that everything else is derived from.

    Attributes:
        layers: decoder layers, without prediction layers (MTP).
        dense_layers: layers at the start without experts.
        moe_step: of the other layers, every how many-th has experts (1: all).
        index_topk: tokens that sparse attention reads.
        indexers: layers, counted from 0, with a sparse-attention indexer of their own.
        shares_indexers: the other layers use the choice of the last indexer before them (IndexShare).
        mtp_layers: prediction layers behind the decoder.
    """

    name: str
    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    # mixture of experts
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    moe_step: int = 1
    router_bias: bool = False
    # multi-latent attention
    q_lora: int = 0
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_dim: int = 0
    # sparse attention
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    indexers: tuple[int, ...] = ()
    shares_indexers: bool = False
    mtp_layers: int = 0
    max_positions: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Shapes:
        """From a model folder or a ``config.json``. Raises ``ConfigError`` naming the file."""
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not a readable model configuration: {error}") from error
        return cls.from_config(raw, str(file))

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], where: str = "config") -> Shapes:
        """From the content of a ``config.json``. Raises ``ConfigError`` naming ``where`` and the key."""
        raw = raw.get("text_config", raw)

        def need(key: str) -> int:
            value = raw.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{where}: {key} is {value!r}; a positive whole number is needed")
            return value

        def get(*keys: str, default: int = 0) -> int:
            return next((int(raw[key]) for key in keys if raw.get(key) is not None), default)

        kind = str(raw.get("model_type", ""))
        hidden, layers, heads = need("hidden_size"), need("num_hidden_layers"), need("num_attention_heads")
        experts = get("n_routed_experts", "num_experts", "num_local_experts")
        latent = raw.get("kv_lora_rank") is not None
        rope, nope = get("qk_rope_head_dim"), get("qk_nope_head_dim")
        indexed = raw.get("index_n_heads") is not None
        every, offset = get("index_topk_freq", default=1), get("index_skip_topk_offset")
        return cls(
            name=str(raw.get("_name_or_path") or kind or "model"),
            hidden=hidden,
            layers=layers,
            vocabulary=need("vocab_size"),
            heads=heads,
            kv_heads=get("num_key_value_heads", default=heads),
            head_dim=rope + nope if latent else get("head_dim", default=hidden // heads),
            ffn=need("intermediate_size"),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bool(raw.get("attention_bias", kind.startswith("qwen2"))) and not latent,
            qk_norm=kind.startswith("qwen3") or bool(raw.get("use_qk_norm", False)),
            experts=experts,
            experts_per_token=get("num_experts_per_tok"),
            expert_ffn=get("moe_intermediate_size", default=need("intermediate_size")) if experts else 0,
            shared_experts=get("n_shared_experts"),
            dense_layers=get("first_k_dense_replace") if experts else layers,
            moe_step=get("decoder_sparse_step", "moe_layer_freq", default=1) or 1,
            router_bias=raw.get("topk_method") == "noaux_tc" or kind.startswith(("deepseek_v3", "glm")),
            q_lora=get("q_lora_rank"),
            kv_lora=get("kv_lora_rank"),
            qk_nope=nope,
            qk_rope=rope,
            v_dim=get("v_head_dim"),
            index_heads=get("index_n_heads"),
            index_dim=get("index_head_dim"),
            index_topk=get("index_topk", default=2048) if indexed else 0,
            indexers=tuple(i for i in range(layers) if indexed and _has_indexer(i, every, offset)),
            shares_indexers=every > 1,
            mtp_layers=get("num_nextn_predict_layers"),
            max_positions=get("max_position_embeddings"),
        )

    # --- per layer

    @property
    def latent(self) -> bool:
        """Whether attention is multi-latent."""
        return self.kv_lora > 0

    @property
    def attention(self) -> int:
        """Elements of one attention, without the indexer and the layer's norms."""
        if not self.latent:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            biases = (q + 2 * kv) if self.qkv_bias else 0
            norms = 2 * self.head_dim if self.qk_norm else 0
            return self.hidden * (q + 2 * kv) + q * self.hidden + biases + norms
        width = self.heads * (self.qk_nope + self.qk_rope)
        query = self.hidden * self.q_lora + self.q_lora + self.q_lora * width if self.q_lora else self.hidden * width
        compressed = self.hidden * (self.kv_lora + self.qk_rope) + self.kv_lora
        expanded = self.kv_lora * self.heads * (self.qk_nope + self.v_dim)
        return query + compressed + expanded + self.heads * self.v_dim * self.hidden

    @property
    def indexer(self) -> int:
        """Elements of one indexer: query and key projections, the key's LayerNorm, head weights."""
        if not self.index_heads:
            return 0
        query = (self.q_lora or self.hidden) * self.index_heads * self.index_dim
        return query + self.hidden * self.index_dim + 2 * self.index_dim + self.hidden * self.index_heads

    @property
    def expert(self) -> int:
        """Elements of one routed (or shared) expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def router(self) -> int:
        """Elements of one router, its selection bias included."""
        return self.experts * self.hidden + (self.experts if self.router_bias else 0)

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) has experts."""
        return bool(self.experts) and layer >= self.dense_layers and (layer + 1) % self.moe_step == 0

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(self.layers)))

    def layer(self, layer: int) -> int:
        """Elements of decoder layer ``layer`` (from 0)."""
        mixer = self.attention + (self.indexer if layer in self.indexers else 0) + 2 * self.hidden
        return mixer + (self.moe if self.has_experts(layer) else 3 * self.hidden * self.ffn)

    @property
    def moe(self) -> int:
        """Elements of one mixture: routed and shared experts and the router."""
        return (self.experts + self.shared_experts) * self.expert + self.router

    # --- totals

    @property
    def components(self) -> tuple[Component, ...]:
        """Every parameter of the model without MTP, by part."""
        table = self.vocabulary * self.hidden
        parts = (
            Component("embedding", 1, table),
            Component("attention", self.layers, self.attention),
            Component("indexer", len(self.indexers), self.indexer),
            Component("dense FFN", self.layers - self.moe_layers, 3 * self.hidden * self.ffn),
            Component("routed experts", self.moe_layers * self.experts, self.expert),
            Component("shared experts", self.moe_layers * self.shared_experts, self.expert),
            Component("router", self.moe_layers, self.router),
            Component("norms", 2 * self.layers + 1, self.hidden),
            Component("head", 0 if self.tied else 1, table),
        )
        return tuple(part for part in parts if part.total)

    @property
    def total(self) -> int:
        """Parameters without MTP."""
        return sum(part.total for part in self.components)

    @property
    def mtp(self) -> int:
        """Parameters of the prediction layers: a decoder layer each, the projection of two states, three norms."""
        if not self.mtp_layers:
            return 0
        layer = (
            self.attention + self.indexer + 2 * self.hidden + (self.moe if self.experts else 3 * self.hidden * self.ffn)
        )
        return self.mtp_layers * (layer + 2 * self.hidden * self.hidden + 3 * self.hidden)

    @property
    def active(self) -> int:
        """Parameters that one token passes through, embedding and head included."""
        return self.total - self.moe_layers * (self.experts - self.experts_per_token) * self.expert

    @property
    def active_conventions(self) -> dict[str, int]:
        """The active count as publishers state it: they differ in what they leave out."""
        table = self.vocabulary * self.hidden
        head = 0 if self.tied else table
        return {
            "all": self.active,
            "without embedding": self.active - (0 if self.tied else table),
            "without embedding and head": self.active - table - head,
        }


def _has_indexer(layer: int, every: int, offset: int) -> bool:
    """IndexShare: the first ``offset`` layers have their own indexer, then every ``every``-th one."""
    if every <= 1:
        return True
    return layer < offset or (layer - offset + 1) % every == 0
