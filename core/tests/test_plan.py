"""The planner's arithmetic against published figures: nothing is fitted, everything follows from shapes."""

from __future__ import annotations

from typing import Any

import pytest
from rlcore.errors import ConfigError
from rlcore.plan.hardware import gpu_named
from rlcore.plan.serving import Serving, kv_cell, kv_tokens
from rlcore.plan.shapes import Shapes
from rlcore.plan.training import Layout, check, problems, stages

GLM_52: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "vocab_size": 154880,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "intermediate_size": 12288,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "vocab_size": 151936,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "decoder_sparse_step": 1,
    "attention_bias": False,
}
QWEN3_30B = QWEN3_235B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
SMOLLM2 = LLAMA_8B | {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
REFERENCE = Layout(gpus=32, tp=2, pp=4, cp=4, ep=8, split=(18, 20, 20, 20), sequence=65536)


@pytest.fixture(scope="module")
def glm() -> Shapes:
    return Shapes.from_config(GLM_52)


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (GLM_52, 743_377_019_904),
        (DEEPSEEK_V3, 671_026_419_200),
        (QWEN3_235B, 235_093_634_560),
        (QWEN3_30B, 30_532_122_624),
        (LLAMA_8B, 8_030_261_248),
        (SMOLLM2, 134_515_008),
    ],
)
def test_parameters_are_those_of_the_published_checkpoint(config: dict[str, Any], total: int) -> None:
    assert Shapes.from_config(config).total == total


def test_every_component_of_glm_is_exact(glm: Shapes) -> None:
    assert {c.name: (c.count, c.each) for c in glm.components} == {
        "embedding": (1, 951_582_720),
        "attention": (78, 165_022_208),
        "indexer": (21, 9_371_904),
        "dense FFN": (3, 226_492_416),
        "routed experts": (75 * 256, 37_748_736),
        "shared experts": (75, 37_748_736),
        "router": (75, 1_573_120),
        "norms": (157, 6144),
        "head": (1, 951_582_720),
    }
    assert glm.total + glm.mtp == 753_329_940_480
    assert [round(n / 1e9, 2) for n in glm.active_conventions.values()] == [41.25, 40.30, 39.35]
    assert glm.indexers == (0, 1, 2, *range(6, 75, 4))


def test_layers_add_up_to_the_components(glm: Shapes) -> None:
    inside = sum(glm.layer(layer) for layer in range(glm.layers))
    assert inside + 2 * glm.vocabulary * glm.hidden + glm.hidden == glm.total
    assert sum(stage.parameters for stage in stages(glm, REFERENCE)) == glm.total


def test_the_reference_layout_has_the_published_optimizer_state(glm: Shapes) -> None:
    """279 GB a rank on average; the stages hold 226, 297, 297 and 298 GB."""
    found = stages(glm, REFERENCE)
    assert [round(stage.optimizer / 1e9) for stage in found] == [226, 297, 297, 298]
    assert round(glm.total * 12 / 32 / 1e9) == 279
    assert REFERENCE.tokens_per_rank == 16384
    assert [(stage.first, stage.last) for stage in found] == [(1, 18), (19, 38), (39, 58), (59, 78)]


def test_tensor_parallel_one_fits_by_steady_state_arithmetic(glm: Shapes) -> None:
    """Weights and gradients of 140 to 176 GB a rank: the remark that TP 1 does not fit is not borne out."""
    found = stages(glm, Layout(gpus=32, tp=1, pp=4, cp=8, ep=8, split=(18, 20, 20, 20)))
    held = [(stage.weights + stage.gradients) / 1e9 for stage in found]
    assert (min(held), max(held)) == pytest.approx((140, 176), abs=0.6)


def test_kv_tokens_follow_from_the_cell_and_the_memory_fraction(glm: Shapes) -> None:
    cell = kv_cell(glm, Serving())
    assert (cell.per_layer, cell.layers, cell.per_token) == (708, 79, 55_932)
    assert kv_tokens(274.5, 0.85, 204.5, cell) == pytest.approx(553_000, abs=1000)
    assert kv_tokens(274.5, 0.75, 204.5, cell) == pytest.approx(26_000, abs=500)
    assert kv_tokens(274.5, 0.5, 204.5, cell) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": (20, 20, 19, 19)}, "stage 2 starts at layer 21.*IndexShare"),
        ({"split": (18, 20, 20, 19)}, "has 77 layers, the model 78"),
        ({"split": (2, 24, 26, 26)}, "fewer than the 3 dense ones"),
        ({"split": (18, 60)}, "has 2 stages, PP is 4"),
        ({"tp": 3, "gpus": 48}, "TP 3 does not divide 64 heads"),
        ({"ep": 7}, "EP 7 does not divide 256 experts"),
        ({"ep": 16}, "EP 16 × expert TP 1 does not divide the 8 ranks of a stage"),
        ({"gpus": 30}, "= 32 does not divide 30 GPUs"),
        ({"sequence": 65535}, "does not divide into 2 × CP 4 parts"),
        ({"tp": 8, "cp": 1}, "crosses the 4 GPUs of a node"),
        ({"pp": 0}, "pp is 0"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_the_reason(
    glm: Shapes, changes: dict[str, Any], message: str
) -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError, match=message):
        check(glm, replace(REFERENCE, **changes), gpus_per_node=4)


def test_the_reference_layout_can_run(glm: Shapes) -> None:
    assert list(problems(glm, REFERENCE, gpus_per_node=4)) == []


@pytest.mark.parametrize("config", [GLM_52, DEEPSEEK_V3, QWEN3_30B, LLAMA_8B, SMOLLM2])
def test_more_sharding_never_needs_more_memory_for_the_state(config: dict[str, Any]) -> None:
    shapes = Shapes.from_config(config)
    few, many = (max(s.optimizer for s in stages(shapes, Layout(gpus=n))) for n in (8, 64))
    assert many < few


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "big", True])
def test_a_configuration_without_a_shape_names_file_and_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"my.json: {key} is "):
        Shapes.from_config(LLAMA_8B | {key: value}, "my.json")


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        gpu_named("h20")
