"""The tiny model is what the whole test suite trains: small, complete, and noisy in the way it is meant to be."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlcore.types import Completion, FinishReason, Message, RunContext, Sampling
from rlcore_engine.engine import EmbeddedEngine
from rlcore_policies.tokenizer import load_renderer
from rlcore_quickstart import make_tiny, tiny_model_path
from rlcore_quickstart.kinds import TINY_KINDS
from rlcore_tbench2.bundled import KINDS, POOLS
from rlcore_tbench2.bundled.kinds import Words
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_it_is_small_enough_to_ship() -> None:
    files = {path.name: path.stat().st_size for path in tiny_model_path().iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sum(files.values()) < 4 * 2**20


def test_transformers_loads_it_with_every_weight() -> None:
    model, info = AutoModelForCausalLM.from_pretrained(tiny_model_path(), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float32
    assert 0.7e6 < model.num_parameters() < 0.9e6


@given(st.text())
def test_a_byte_is_a_token_and_comes_back(text: str) -> None:
    tokenizer = _tokenizer()
    text = text.encode("utf-8", "replace").decode()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def _tokenizer(made: list = []) -> object:  # noqa: B006 - loaded once
    if not made:
        made.append(AutoTokenizer.from_pretrained(tiny_model_path()))
    return made[0]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_it_was_warmed_up_on_the_ids_that_a_session_gives_it(kind: str) -> None:
    """The script writes conversations by hand; a session renders them: one differing token would spoil the model."""
    instance = KINDS[kind].make(Words(random.Random(0), POOLS["heldout"]))
    row, learned = make_tiny.answer_row(instance)
    renderer = load_renderer(tiny_model_path())
    history = [Message("user", instance.instruction)]
    ids = renderer.render(history)
    for number, (command, output) in enumerate(instance.steps):
        answer = (*command.encode(), make_tiny.END)
        assert learned[len(ids) : len(ids) + len(answer)] == [True] * len(answer)
        ids += answer
        if number + 1 < len(instance.steps):
            new = [Message("user", output)]
            added = renderer.extend(history, Completion(answer, (0.0,) * len(answer), FinishReason.STOP), new)
            assert added is not None
            ids += added
            history += [Message("assistant", command), *new]
    assert row == [*ids, ord("\n")]


def test_it_solves_some_tasks_and_more_when_greedy() -> None:
    """Sharpening needs both: success to begin with, and something to gain. Unseen names."""
    sampled, greedy = asyncio.run(_success(1.0)), asyncio.run(_success(0.0))
    assert 0.05 <= sampled <= 0.4
    assert greedy >= sampled + 0.2


async def _success(temperature: float, count: int = 96) -> float:
    engine = EmbeddedEngine(EmbeddedEngine.Config(threads=1))
    await engine.start(RunContext("test", Path(), 0, {"path": str(tiny_model_path()), "dtype": "auto"}))
    renderer, rng = load_renderer(tiny_model_path()), random.Random(1)

    async def solves(number: int) -> bool:
        instance = KINDS[TINY_KINDS[number % len(TINY_KINDS)]].make(Words(rng, POOLS["heldout"]))
        messages: list[Message] = []
        said = instance.instruction
        for command, output in instance.steps:
            messages.append(Message("user", said))
            sampling = Sampling(temperature=temperature, seed=number)
            made = await engine.generate(renderer.render(messages), max_tokens=48, sampling=sampling)
            if renderer.decode(made.out) != command:
                return False
            messages.append(Message("assistant", command))
            said = output
        return True

    try:
        return sum(await asyncio.gather(*map(solves, range(count)))) / count
    finally:
        await engine.aclose()


def test_a_made_model_is_the_same_in_transformers(tmp_path: Path) -> None:
    """What the script writes is what it learned, rounded to bfloat16, and learning learns."""
    losses = []
    for step, loss, model in make_tiny.make():  # noqa: B007
        losses.append(loss)
        if step == 8:
            break
    assert losses[-1] < losses[0]
    make_tiny.write_model(tmp_path / "made", model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    ids = torch.tensor([[257, *b"user\nDelete a.txt", 258]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
