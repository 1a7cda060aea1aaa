"""The trainer around the step: engine, checkpoints, exports, cancellation, errors."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
import torch
from rlcore.errors import ConfigError, RlcoreError
from rlcore.protocols import Trainer
from rlcore_torch.model import compute_dtype
from rlcore_torch.trainer import TorchTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer


def weights_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def test_it_is_a_trainer_whose_options_need_no_torch():
    assert isinstance(TorchTrainer(TorchTrainer.Config()), Trainer)
    code = (
        "import sys, rlcore_torch.trainer as t; t.TorchTrainer.Config(lr=1e-5);"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.anyio
async def test_logprobs_of_engine_and_trainer_agree(start, model_folder, make_batch, objective, family):
    """Within 1e-4 in float32, before and after an update that the engine took over."""
    from rlcore_engine.models import load_model

    folder, batch = model_folder(family), make_batch()
    trainer = await start(folder, lr=1e-3)
    engine = load_model(folder, dtype="float32")
    for _ in range(2):
        result = await trainer.step(batch, objective())
        for row, values in zip(batch.samples, result.logprobs, strict=True):
            with torch.inference_mode():
                for t, trained in enumerate(row.mask):
                    if trained:
                        logits = prefill(engine, row.token_ids[:t])
                        assert values[t] == pytest.approx(float(logits.log_softmax(-1)[row.token_ids[t]]), abs=1e-4)
        with torch.inference_mode():
            engine.load(trainer.weights())
            engine.forget()


def prefill(engine, prompt: list[int]) -> torch.Tensor:
    work = engine.prefill([prompt])
    while True:
        try:
            next(work)
        except StopIteration as end:
            engine.release(0, keep=False)
            return end.value.logits[0]


@pytest.mark.fault("SYN-10")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2", "mixtral"])
@pytest.mark.anyio
async def test_weights_have_the_names_of_the_checkpoint_and_its_shapes(start, model_folder, family):
    """Tied pairs once, experts one by one, each tensor as it was read."""
    from safetensors.torch import load_file

    folder = model_folder(family, **({"num_key_value_heads": 2} if family == "mixtral" else {}))
    stored = load_file(folder / "model.safetensors")
    published = weights_of(await start(folder))
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.anyio
async def test_a_checkpoint_continues_exactly(start, model_folder, make_batch, objective, tmp_path, dtype):
    folder = model_folder()
    one = await start(folder, dtype, warmup_steps=3, weight_decay=0.01)
    for seed in range(2):
        await one.step(make_batch(seed=seed), objective())
    await one.save(tmp_path / "checkpoint")
    torch.manual_seed(1)
    other = await start(folder, dtype, warmup_steps=3, weight_decay=0.01)
    await other.load(tmp_path / "checkpoint")
    assert torch.load(tmp_path / "checkpoint" / "trainer.pt", weights_only=True)["updates"] == 2
    for seed in range(2, 4):
        drawn = torch.get_rng_state()
        first = await one.step(make_batch(seed=seed), objective())
        torch.set_rng_state(drawn)
        second = await other.step(make_batch(seed=seed), objective())
        assert first.metrics["loss"] == second.metrics["loss"]
        assert first.metrics["lr"] == second.metrics["lr"]
    mine, theirs = weights_of(one), weights_of(other)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    masters, others = one._worker.optimizer.masters, other._worker.optimizer.masters
    assert all(torch.equal(tensor, others[name]) for name, tensor in masters.items())


@pytest.mark.anyio
async def test_random_numbers_go_on_where_they_were(start, model_folder, tmp_path):
    import random

    import numpy as np

    trainer = await start(model_folder())
    await trainer.save(tmp_path)
    expected = (torch.rand(3).tolist(), random.random(), float(np.random.rand()))
    await trainer.load(tmp_path)
    assert (torch.rand(3).tolist(), random.random(), float(np.random.rand())) == expected


@pytest.mark.anyio
async def test_a_checkpoint_of_another_model_or_a_broken_one_is_refused(
    start, model_folder, make_batch, objective, tmp_path
):
    other = await start(model_folder("qwen2"))
    await other.save(tmp_path / "other")
    trainer = await start(model_folder())
    before = weights_of(trainer)
    with pytest.raises(ConfigError, match="another model"):
        await trainer.load(tmp_path / "other")
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        await trainer.load(tmp_path / "absent")
    (tmp_path / "other" / "masters.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        await trainer.load(tmp_path / "other")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from rlcore.errors import RunFailed
from rlcore.learn import checkpoints
from rlcore.types import RunContext
from rlcore_torch import checkpoint
from rlcore_torch.trainer import TorchTrainer

model, folder, before = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
written, save_file = [], checkpoint.save_file

def fill():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def save_then_fill(tensors, path):
    save_file(tensors, path)
    written.append(path)
    if len(written) == before:
        fill()

async def main():
    trainer = TorchTrainer(TorchTrainer.Config(device="cpu"))
    await trainer.start(RunContext("test", folder, 0, {"path": model, "dtype": "float32"}))
    optimizer = trainer._worker.optimizer
    for name in optimizer.masters:
        optimizer._moments(name)  # as after a step
    await checkpoints.save(folder, 1, {}, trainer.save, keep=1)
    checkpoint.save_file = save_then_fill
    if before == 0:
        fill()
    try:
        await checkpoints.save(folder, 2, {}, trainer.save, keep=1)
    except RunFailed as error:
        print(error)
    fill()
    try:
        await trainer.export(folder / "export")
    except OSError as error:
        print(error)
    await trainer.load(checkpoints.latest(folder)[0])
    await trainer.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("before", range(3), ids=["masters.safetensors", "moments.safetensors", "trainer.pt"])
def test_a_disk_that_is_full_is_one_clear_error_and_leaves_the_last_checkpoint(model_folder, tmp_path, request, before):
    """The disk takes no more than 4 KiB a file after ``before`` files; a checkpoint is the new one or the old one."""
    script = [sys.executable, "-c", FULL_DISK, str(model_folder()), str(tmp_path), str(before)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=300)
    failed, exported = done.stdout.splitlines()
    assert failed.startswith(f"checkpoint of step 2 could not be written to {tmp_path}: ")
    assert request.node.callspec.id in failed
    assert "File too large" in failed
    assert str(tmp_path / "export") in exported
    assert "File too large" in exported
    assert [path.name for path in tmp_path.glob("*step-*")] == ["step-000001"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gemma2"])
@pytest.mark.anyio
async def test_an_export_has_equal_logits_and_its_tokenizer(
    start, model_folder, make_batch, objective, tmp_path, family, dtype
):
    folder = model_folder(family, **({"num_key_value_heads": 2, "head_dim": 12} if family == "gemma2" else {}))
    trainer = await start(folder, dtype, lr=1e-2)
    await trainer.step(make_batch(), objective())
    await trainer.export(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert exported.dtype == getattr(torch, dtype)
    tokens = torch.tensor([make_batch().samples[0].token_ids])
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, trainer._worker.model.module(tokens).logits)
        original = AutoModelForCausalLM.from_pretrained(folder)
        assert not torch.equal(original(tokens).logits, exported(tokens).logits.float())
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")("ls").input_ids
        == AutoTokenizer.from_pretrained(folder)("ls").input_ids
    )


@pytest.mark.anyio
async def test_a_cancelled_step_stops_at_the_next_micro_batch_and_changes_nothing(
    start, model_folder, make_batch, objective
):
    from rlcore_losses.losses import PPOClip

    begun = threading.Event()

    class Slow(PPOClip):
        calls = 0

        def __call__(self, *arguments):
            self.calls += 1
            begun.set()
            time.sleep(0.2)
            return super().__call__(*arguments)

    trainer = await start(model_folder(), micro_batch_tokens=1)
    before = weights_of(trainer)
    loss, batch = Slow(PPOClip.Config()), make_batch(groups=8)
    step = asyncio.ensure_future(trainer.step(batch, objective(loss=loss)))
    await asyncio.to_thread(begun.wait, 20)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    calls = loss.calls
    assert calls < len(batch.samples)
    await asyncio.sleep(0.3)
    assert loss.calls == calls
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())
    assert (await trainer.step(batch, objective())).metrics["nonfinite"] == 0


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.anyio
async def test_a_cancelled_step_stops_inside_a_long_micro_batch(start, model_folder, make_batch, objective, family):
    trainer = await start(model_folder(family, num_hidden_layers=8))
    before, model, begun, calls = weights_of(trainer), trainer._worker.model, threading.Event(), []
    slow = model._states

    def states(layout):
        heed = model.heed

        def count():
            heed()
            calls.append(time.monotonic())
            begun.set()
            time.sleep(0.1)

        model.heed = count
        return slow(layout)

    model._states = states
    step = asyncio.ensure_future(trainer.step(make_batch(), objective()))
    await asyncio.to_thread(begun.wait, 20)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert len(calls) < 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights())


@pytest.mark.anyio
async def test_the_event_loop_runs_on_while_a_step_is_computed(start, model_folder, make_batch, objective):
    trainer = await start(model_folder())
    threads = set()
    original = trainer._worker.step

    def step(*arguments):
        threads.add(threading.current_thread().name)
        time.sleep(0.3)
        return original(*arguments)

    trainer._worker.step = step
    task, turns = asyncio.ensure_future(trainer.step(make_batch(), objective())), 0
    while not task.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 10
    assert all(name.startswith("rlcore-torch") for name in threads)
    await trainer.aclose()
    assert not [t for t in threading.enumerate() if t.name.startswith("rlcore-torch")]
    with pytest.raises(RlcoreError, match="not started"):
        await trainer.step(make_batch(), objective())


@pytest.mark.anyio
async def test_wrong_models_and_devices_are_one_clear_error(start, model_folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for folder, options, message in (
        (tmp_path / "absent", {}, "model.path: .*absent is not a model"),
        (tmp_path, {}, "model.path: .* cannot be loaded"),
        (model_folder(), {"device": "cuda:99"}, "trainer.device"),
        (model_folder(), {"device": "abacus"}, "trainer.device"),
    ):
        with pytest.raises(ConfigError, match=message):
            await start(folder, **options)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model_folder().iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    with pytest.raises(ConfigError, match=r"model\.path: .* cannot be loaded"):
        await start(broken)


@pytest.mark.anyio
async def test_bfloat16_keeps_float32_masters_that_move_by_less_than_bfloat16_can_show(
    start, model_folder, make_batch, objective
):
    trainer = await start(model_folder(), "bfloat16", lr=1e-6)
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.bfloat16}
    masters = {name: tensor.clone() for name, tensor in trainer._worker.optimizer.masters.items()}
    result = await trainer.step(make_batch(), objective())
    assert result.metrics["nonfinite"] == 0
    for name, tensor in trainer._worker.optimizer.masters.items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, masters[name])


def test_small_models_compute_in_float32_unless_told_otherwise():
    cpu = torch.device("cpu")
    assert compute_dtype("auto", 128, cpu) == torch.float32
    assert compute_dtype("bfloat16", 128, cpu) == torch.bfloat16
    assert compute_dtype("float32", 4096, cpu) == torch.float32
