"""The trainer's options as Megatron-Core 0.19 names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm52_plugin.model import GLM52

__all__ = ["megatron_settings", "pipeline_layout"]


def megatron_settings(layers: int, options: Any) -> dict[str, dict[str, Any]]:
    """Fields by dataclass of Megatron-Core: transformer (MLA, its parallel sizes included), DDP, optimizer."""
    return {
        "megatron MLATransformerConfig": {**_model(layers, options), **_parallel(layers, options)},
        "megatron DistributedDataParallelConfig": {
            "use_distributed_optimizer": True,
            "grad_reduce_in_fp32": options.fp32_gradients,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "average_in_collective": False,
            "check_for_nan_in_grad": True,
        },
        "megatron OptimizerConfig": {
            "optimizer": "adam",
            "lr": options.lr,
            "weight_decay": options.weight_decay,
            "adam_beta1": options.betas[0],
            "adam_beta2": options.betas[1],
            "adam_eps": options.eps,
            "clip_grad": options.max_grad_norm,
            "use_distributed_optimizer": True,
            "bf16": True,
            "params_dtype": "bfloat16",
        },
    }


def pipeline_layout(split: tuple[int, ...]) -> str:
    """Megatron's notation: embedding and layers of the first stage, …, layers of the last one and the loss."""
    stages = [f"t*{count}" for count in split]
    return "|".join(["E" + stages[0], *stages[1:]]) + "L"


def _model(layers: int, options: Any) -> Mapping[str, Any]:
    dense = min(GLM52["first_k_dense_replace"], layers)
    return {
        "num_layers": layers,
        "mtp_num_layers": GLM52["num_nextn_predict_layers"] if options.train_mtp else None,
        "hidden_size": GLM52["hidden_size"],
        "num_attention_heads": GLM52["num_attention_heads"],
        "ffn_hidden_size": GLM52["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": GLM52["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": GLM52["hidden_act"],
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "qk_layernorm": True,
        # latent attention; Megatron counts the rotary part of a head apart, Hugging Face within its qk_head_dim of 256,
        # and MLA interleaves by itself: rotary_interleaved must stay off
        "multi_latent_attention": True,
        "q_lora_rank": GLM52["q_lora_rank"],
        "kv_lora_rank": GLM52["kv_lora_rank"],
        "qk_head_dim": GLM52["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": GLM52["qk_rope_head_dim"],
        "v_head_dim": GLM52["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": GLM52["rope_parameters"]["rope_theta"],
        "apply_rope_fusion": False,
        # sparse attention
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": GLM52["index_n_heads"],
        "dsa_indexer_head_dim": GLM52["index_head_dim"],
        "dsa_indexer_topk": GLM52["index_topk"],
        "dsa_indexer_topk_freq": GLM52["index_topk_freq"],
        "dsa_indexer_skip_topk_offset": GLM52["index_skip_topk_offset"],
        "dsa_indexer_rope_interleaved": True,  # of GLM, unlike DeepSeek-V3.2
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_loss_coeff": 0.0,
        # experts
        "num_moe_experts": GLM52["n_routed_experts"],
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_ffn_hidden_size": GLM52["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": GLM52["n_shared_experts"] * GLM52["moe_intermediate_size"],
        "moe_router_topk": GLM52["num_experts_per_tok"],
        "moe_router_score_function": GLM52["scoring_func"],
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": GLM52["routed_scaling_factor"],
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3 if options.train_router_bias else 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss" if options.aux_loss else "none",
        "moe_aux_loss_coeff": options.aux_loss,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_permute_fusion": True,
        # the loss is a sum over tokens; the trainer divides once
        "calculate_per_token_loss": True,
        "recompute_granularity": "full" if options.recompute == "full" else None,
        "recompute_method": "uniform" if options.recompute == "full" else None,
        "recompute_num_layers": 1 if options.recompute == "full" else None,
    }


def _parallel(layers: int, options: Any) -> Mapping[str, Any]:
    return {
        "tensor_model_parallel_size": options.tp,
        "sequence_parallel": options.tp > 1,
        "pipeline_model_parallel_size": options.pp,
        "pipeline_model_parallel_layout": pipeline_layout(options.split) if options.pp > 1 else None,
        "context_parallel_size": options.cp,
        "cp_comm_type": "allgather" if options.cp > 1 else None,
        "expert_model_parallel_size": options.ep,
        "expert_tensor_parallel_size": options.etp,
        "variable_seq_lengths": True,
        "bf16": True,
        "params_dtype": "bfloat16",
        "pipeline_dtype": "bfloat16",
    }
