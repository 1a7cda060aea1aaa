"""The model: its configuration as published, cuts of it for bring-up, and its small random sister."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.plan.shapes import Shapes

__all__ = ["CUTS", "GLM52", "TOY", "recipe_for", "shapes_of"]

GLM52: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "vocab_size": 154880,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 12288,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "rope_interleave": True,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""``config.json`` of GLM-5.2, as far as anything is derived from it."""

CUTS = (5, 6, 20, 78)
"""Depths. 5 and 6: the dense layers and two or three with experts, which share an indexer's choice; 20: four more indexers,
so that a pipeline can be cut; 78: the model."""

TOY: Mapping[str, Any] = {
    **GLM52,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
"""The same architecture, every part of it, with 8 layers: layers 4 to 6 and 8 share an indexer's choice. The vocabulary is
that of the tokenizer that it is written with."""


def shapes_of(layers: int = 78) -> Shapes:
    """The shapes of GLM-5.2, or of its first ``layers`` layers."""
    depth = {} if layers == 78 else {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    name = "GLM-5.2" if layers == 78 else f"GLM-5.2, first {layers} layers"
    return Shapes.from_config({**GLM52, **depth, "_name_or_path": name}, "glm52")


def recipe_for(model: str, hardware: str) -> str | None:
    """The recipe for a model folder by its ``config.json``; where that cannot be read, by the folder's name."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        name = Path(model).name.lower().replace("_", "-")
        return "glm52" if name.startswith(("glm-5.2", "glm5.2", "glm52")) else None
    if not isinstance(found, dict) or found.get("model_type") != GLM52["model_type"]:
        return None
    if found.get("hidden_size") == GLM52["hidden_size"]:
        return "glm52"
    return "glm52-toy" if hardware == "cpu" else None
