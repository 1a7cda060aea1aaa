"""``rlcore export``: what a run learned, as transformers loads it."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_export_writes_the_trained_weights_and_the_tokenizer(folder: Any) -> None:
    done = folder.train("--set", "run.checkpoint_every=2")
    assert done.returncode == 0, done.stderr
    done = folder.rlcore("export", "-p", "say_env", "runs/run", "out/model", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 3
    out = folder.path / "out" / "model"
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = load_file(folder.run / "checkpoints" / "step-000003" / "masters.safetensors")
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    assert AutoTokenizer.from_pretrained(out)("say 1").input_ids
    assert [path.name for path in (folder.path / "out").iterdir()] == ["model"]

    earlier = folder.rlcore("export", "-p", "say_env", "runs/run", "out/earlier", "--step", "2")
    assert earlier.returncode == 0, earlier.stderr
    before = AutoModelForCausalLM.from_pretrained(folder.path / "out" / "earlier")
    assert any(not torch.equal(p, trained[name]) for name, p in before.named_parameters())

    for arguments, message in (
        (("runs/run", "out/model"), "is not an empty folder"),
        (("runs/run", "out/x", "--step", "1"), "no complete checkpoint of step 1; there are 2, 3"),
        (("out", "out/x"), "is not a run directory"),
    ):
        done = folder.rlcore("export", "-p", "say_env", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (folder.path / "out" / "x").exists()
