"""`rlcore plan`: shapes in, a plan out; units in every label; layouts searched with the reasons of the others."""

import json
import subprocess
import sys
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore.cli import main
from rlcore.plan.hardware import GPUS, gpu_named
from rlcore.plan.report import PlanRequest, make_plan
from rlcore.plan.serving import Serving, decode_tokens_per_second, kv_cell, kv_tokens_per_rank, serving_problems
from rlcore.plan.shapes import Shapes
from rlcore.plan.steps import HEADROOM, Workload, fits, step_time
from rlcore.plan.suggest import NOISE, balanced_split, suggest
from rlcore.plan.training import Layout, index_share_starts, problems, stages

MODELS: dict[str, dict[str, Any]] = {
    "glm-5.2": {
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "vocab_size": 154880,
        "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 12288, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4,
        "index_skip_topk_offset": 3, "num_nextn_predict_layers": 1, "max_position_embeddings": 1048576,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280,
        "num_attention_heads": 128, "intermediate_size": 18432, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 163840,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "vocab_size": 151936,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "decoder_sparse_step": 1,
        "attention_bias": False, "max_position_embeddings": 40960,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "max_position_embeddings": 131072,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[request.param]))
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, words)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


GPUS_OF = {"glm-5.2": 64, "deepseek-v3": 128, "qwen3-235b": 64, "llama-3.1-8b": 8, "smollm2-135m": 8}


@pytest.mark.parametrize("name", MODELS)
def test_suggestions_fit_and_every_other_layout_has_its_reason(name: str) -> None:
    shapes, gpu = Shapes.from_config(MODELS[name]), gpu_named("h200")
    base = Layout(GPUS_OF[name], sequence=8192)
    found = suggest(shapes, base, gpu, Workload(), gpu.per_node)
    assert found.fitting
    for candidate in found.fitting:
        assert not list(problems(shapes, candidate.layout, gpu.per_node))
        assert candidate.peak_gib <= gpu.memory_gib * HEADROOM
        assert fits(stages(shapes, candidate.layout), gpu) == candidate.state
    ranks = [(round(log(c.seconds) / log(1 + NOISE)), c.peak_gib) for c in found.fitting]
    assert ranks == sorted(ranks), "the fastest first; of equally fast ones, the one with most room"
    assert all(r.count > 0 and r.reason and r.example.startswith("TP ") for r in found.rejected)
    assert len({r.reason for r in found.rejected}) == len(found.rejected)


def test_a_large_model_on_few_gpus_is_told_what_is_too_large() -> None:
    found = suggest(Shapes.from_config(MODELS["glm-5.2"]), Layout(8), gpu_named("h100"), Workload(), 8)
    assert not found.fitting
    assert any("too large" in r.reason and "GiB" in r.example for r in found.rejected)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_balanced_split_is_allowed_and_the_best(name: str, pp: int) -> None:
    shapes = Shapes.from_config(MODELS[name])
    split = balanced_split(shapes, pp)
    assert len(split) == pp
    assert sum(split) == shapes.layers
    assert not list(problems(shapes, Layout(pp, pp=pp, split=split)))
    if pp == 2:
        allowed = set(index_share_starts(shapes))
        possible = [
            (first, shapes.layers - first)
            for first in range(max(1, shapes.dense_layers if shapes.experts else 1), shapes.layers)
            if first + 1 in allowed
        ]
        largest = {s: max(x.parameters for x in stages(shapes, Layout(2, pp=2, split=s))) for s in possible}
        own = max(x.parameters for x in stages(shapes, Layout(2, pp=2, split=split)))
        assert own <= min(largest.values()) + (shapes.vocabulary * shapes.hidden if shapes.tied else shapes.hidden)


def test_the_reference_split_of_glm_is_an_allowed_one_and_the_search_is_no_worse() -> None:
    shapes = Shapes.from_config(MODELS["glm-5.2"])
    reference = max(s.parameters for s in stages(shapes, Layout(4, pp=4, split=(18, 20, 20, 20))))
    found = max(s.parameters for s in stages(shapes, Layout(4, pp=4, split=balanced_split(shapes, 4))))
    assert found <= reference


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(GPUS)), st.integers(1, 512), st.floats(0.1, 0.9))
def test_faster_assumptions_never_make_a_step_slower(name: str, gpu: str, rows: int, mfu: float) -> None:
    shapes, kind = Shapes.from_config(MODELS[name]), gpu_named(gpu)
    layout, serving = Layout(8), Serving(gpus=4, ep=1, dp_attention=4)
    found = stages(shapes, layout)
    work = Workload(rows=rows, mfu=mfu)

    def seconds(**changes: Any) -> float:
        return step_time(shapes, layout, found, serving, kind, replace(work, **changes), 8).seconds

    assert seconds(mfu=mfu * 1.1) <= seconds()
    assert seconds(disk_gb_s=100.0) <= seconds()
    assert seconds(rows=rows + 1) >= seconds()
    assert seconds(overlap=False) >= seconds()
    assert seconds(accepted=2.0) <= seconds()


@pytest.mark.parametrize("name", MODELS)
def test_more_sequences_at_once_decode_more_tokens_and_none_are_free(name: str) -> None:
    shapes = Shapes.from_config(MODELS[name])
    rates = [
        decode_tokens_per_second(
            shapes, Serving(), gpu_named("h200"), running, 4096, efficiency=0.5, layer_latency_us=10, accepted=1
        )
        for running in (1, 8, 64)
    ]
    assert rates == sorted(rates)
    assert rates[2] < 64 * rates[0] * 1.0001


def test_the_two_cells_that_the_reference_mentions() -> None:
    """708 bytes in 8 bits throughout; 788 with scales and a 16-bit rotary key."""
    shapes = Shapes.from_config(MODELS["glm-5.2"])
    assert kv_cell(shapes, Serving()).per_layer == 708
    assert kv_cell(shapes, Serving(kv_scales=True)).per_layer == 788
    assert kv_cell(shapes, Serving(kv_bits=16)).per_layer == 2 * 576 + 132
    assert kv_cell(
        Shapes.from_config(MODELS["llama-3.1-8b"]), Serving(gpus=4, dp_attention=1, kv_bits=16)
    ).per_layer == (2 * 2 * 128 * 2)


def test_tokens_for_a_given_cell_and_memory_fraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["glm-5.2"]))
    words = ["--gpu", "gb300", "--nodes", "64", "--json", "--set", "serving.weight_bits=8", "--set", "serving.mtp=true"]
    words += ["--set", "serving.cell_bytes=788", "--set", "serving.buffers_gib=17.05"]
    made = json.loads(run(capsys, tmp_path, *words, "--set", "serving.memory_fraction=0.9")[1])["serving"]
    static = made["weights_gib_per_rank"] + 17.05
    assert made["kv_bytes_per_token"] == 788 * 79
    assert made["kv_tokens_per_rank"] == int((274.5 * 0.9 - static) * 2**30 // (788 * 79))


def test_an_engine_that_cannot_hold_one_sequence_is_named_with_its_figures() -> None:
    shapes = Shapes.from_config(MODELS["glm-5.2"])
    serving = Serving(memory_fraction=0.75, buffers_gib=17.05)
    assert kv_tokens_per_rank(shapes, serving, gpu_named("gb300")) == pytest.approx(26_000, abs=500)
    (problem,) = serving_problems(shapes, serving, gpu_named("gb300"), 65536)
    assert "fewer than one sequence of 65,536" in problem
    assert "187.4 GiB" in problem


def test_the_command_says_everything_with_units(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, model, "--gpu", "b200", "--nodes", 16, "--set", "training.pp=4")
    shapes = Shapes.read(model)
    assert f"{shapes.total:,}" in out
    for label in ("weights GB", "optimizer GB", "GiB", "tokens", "seconds", "TFLOP/s"):
        assert label in out
    assert "\x1b" not in out


def test_json_holds_the_same_figures_in_bytes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, model, "--gpu", "gb300", "--nodes", 32, "--suggest", "--json")
    made = json.loads(out)
    shapes = Shapes.read(model)
    assert made["parameters"]["total"] == shapes.total == sum(s["parameters"] for s in made["training"]["stages"])
    assert made["weight_sync_bytes"] == 2 * shapes.total
    assert made["suggestions"]["fitting"]
    assert (status == 2) == bool(made["problems"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "training.tpp=2"], "training.tpp: unknown key; did you mean 'tp'"),
        (["--set", "training.tp=two"], 'training.tp: should be a valid integer, not "two"'),
        (
            ["--set", "training.split=a-b"],
            "training.split: should be layers of each stage, as in 18-20-20-20, not 'a-b'",
        ),
        (["--set", "workload.mfu=inf"], "workload.mfu: should be a finite number"),
        (["--set", "workload.overlap=perhaps"], "workload.overlap: should be a valid boolean"),
        (["--set", "training.recompute=some"], "training.recompute: should be 'full' or 'none'"),
        (["--set", "training.tp=-1"], "training.tp: should be greater than or equal to 0"),
        (["--set", "training.tp"], "--set training.tp: write it as KEY=VALUE"),
        (["--gpu", "h2000"], "did you mean 'h200'"),
        (["--set", "rollout.in_flight=3"], "has no recipe's keys"),
        (["--nodes", "0"], "nodes"),
    ],
)
def test_mistakes_name_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]))
    status, _, err = run(capsys, tmp_path, *words)
    assert status == 2
    assert message in err


def test_a_name_that_is_no_recipe_and_no_model_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "quickstrat")
    assert status == 2
    assert "neither a recipe nor a folder" in err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.tp=5", "TP 5 × PP 1 × CP 1 = 5 does not divide 8 GPUs"),
        ("training.cp=0", "cp is 0"),
        ("serving.gpus=3", "engine: attention over 3 GPUs does not divide 32 heads"),
        ("serving.dp_attention=3", "data-parallel attention 3 does not divide"),
        ("serving.ep=0", "ep is 0"),
        ("serving.memory_fraction=0.01", "the cache of one rank holds 0 tokens"),
    ],
)
def test_what_cannot_run_is_a_problem_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]))
    status, out, _ = run(capsys, tmp_path, "--set", setting)
    assert status == 2
    assert message in out
    assert run(capsys, tmp_path, "--set", setting, "--json")[0] == 2


def test_replay_needs_no_engine() -> None:
    shapes, gpu = Shapes.from_config(MODELS["llama-3.1-8b"]), gpu_named("h200")
    made = make_plan(PlanRequest("replay", shapes, gpu, 8, Layout(8, tp=8), None, Workload()))
    assert not made.problems
    assert made.time is not None
    assert made.time.seconds == pytest.approx(made.time.training_seconds)
    assert made.to_dict()["serving"] is None


def test_it_is_light(tmp_path: Path) -> None:
    """No torch, no rich without a terminal, under 2 s of CPU with a search."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["glm-5.2"]))
    code = (
        "import sys, resource, rlcore.cli as c\n"
        f"try: c.main(['plan', {str(tmp_path)!r}, '--nodes', '16', '--gpu', 'gb300', '--suggest', '--json'])\n"
        "except SystemExit: pass\n"
        "u = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = [m for m in ('torch', 'rich', 'ray', 'numpy', 'pyarrow', 'transformers') if m in sys.modules]\n"
        "print(u.ru_utime + u.ru_stime, heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    seconds, _, heavy = done.stderr.strip().splitlines()[-1].partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 2
