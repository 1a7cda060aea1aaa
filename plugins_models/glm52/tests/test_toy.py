"""The small sister: the whole architecture, trained and served for real on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from glm52_plugin.model import CUTS, GLM52, TOY, shapes_of
from glm52_plugin.toy import Glm52Toy
from rlcore.cli import main
from rlcore.errors import ConfigError
from rlcore.plan.shapes import Shapes
from rlcore.plan.training import index_share_starts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    return tmp_path / "cache"


def made(**options: Any) -> Glm52Toy:
    toy = Glm52Toy(Glm52Toy.Config(**options))
    toy.prepare(None)  # type: ignore[arg-type]
    return toy


def test_it_has_every_part_of_the_architecture() -> None:
    assert TOY.keys() == GLM52.keys()
    small = Shapes.from_config(TOY)
    assert {part.name for part in small.components} == {part.name for part in shapes_of().components}
    assert small.shares_indexers
    assert len(small.indexers) < small.layers
    assert small.moe_layers == small.layers - 3


@pytest.mark.parametrize("layers", [5, 8])
def test_the_planner_counts_what_transformers_builds(layers: int) -> None:
    """Parameters from shapes equal the elements of the model itself, indexers that are shared included."""
    from transformers import AutoModelForCausalLM

    toy = made(layers=layers)
    folder = toy._folder("model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    shapes = Shapes.read(folder)
    buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert sum(p.numel() for p in model.parameters()) + buffers == shapes.total
    with_indexer = {n.split(".")[2] for n, _ in model.named_parameters() if "indexer" in n}
    assert with_indexer == set(map(str, shapes.indexers))


def test_a_second_preparation_changes_nothing(cache: Path) -> None:
    made()
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    made()
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set RLCORE_CACHE"):
        made()


def test_it_trains_a_step_and_serves_what_it_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engine and trainer agree on log-probs before and after an update; the weights move in every kind of tensor."""
    import torch
    from safetensors.torch import load_file

    words = ["train", "glm52-toy", "--json", "--set", f"run.dir={tmp_path}/runs", "--set", "run.id=toy"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--set", "trainer.lr=1e-2"])
    assert not ended.value.code, capsys.readouterr().err
    run = tmp_path / "runs" / "toy"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [step for step in steps if step.get("grad_norm") is not None]
    assert len(taken) == 2
    assert all(step["grad_norm"] > 0 for step in taken)
    assert all(abs(step["k3"]) < 1e-3 for step in taken), "the engine serves what the trainer has"
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run), str(tmp_path / "out")])
    assert not ended.value.code, capsys.readouterr().err
    start = load_file(next((tmp_path / "cache/glm52-toy").glob("model-*/model.safetensors")))
    end = load_file(tmp_path / "out" / "model.safetensors")
    assert start.keys() == end.keys()
    moved = {name for name in start if not torch.equal(start[name].float(), end[name].float())}
    for kind in ("q_a_proj", "kv_b_proj", "o_proj", "experts", "shared_experts", "mlp.gate.weight", "lm_head", "norm"):
        assert any(kind in name for name in moved), kind
    assert not any("e_score_correction_bias" in name for name in moved)


@pytest.mark.parametrize("layers", CUTS)
def test_a_cut_is_the_first_layers_of_the_model(layers: int) -> None:
    whole, cut = shapes_of(), shapes_of(layers)
    assert [cut.layer(n) for n in range(layers)] == [whole.layer(n) for n in range(layers)]
    assert cut.indexers == tuple(n for n in whole.indexers if n < layers)


def test_stages_may_start_where_an_indexer_is() -> None:
    assert index_share_starts(shapes_of()) == [1, 2, 3, *range(7, 76, 4)]
