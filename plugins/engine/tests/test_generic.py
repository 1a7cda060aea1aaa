"""Families that only transformers knows, experts and sparse attention too, behind the same engine."""

import asyncio

import pytest
import torch
from rlcore.types import Sampling
from rlcore_engine.models.llama import read_safetensors
from rlcore_engine.testing import tiny_model

pytestmark = pytest.mark.anyio
GREEDY = Sampling(temperature=0.0)
GLM = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    root = tmp_path_factory.mktemp("glm")
    return [tiny_model(root / str(seed), "glm4_moe", seed=seed, **GLM) for seed in (0, 1)]


@torch.inference_mode()
def check(model, request):
    logits = model(torch.tensor([request.tokens])).logits[0, len(request.prompt) - 1 : -1]
    exact = logits.log_softmax(-1).gather(1, torch.tensor(request.out)[:, None])[:, 0]
    assert torch.tensor(request.logprobs) == pytest.approx(exact, abs=1e-4)
    assert request.out == logits.argmax(-1).tolist()


async def test_experts_are_served_and_updated_by_the_names_of_the_checkpoint(start, reference, glm):
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9, 10]]
    async with start(glm[0]) as engine:
        for request in await asyncio.gather(*(engine.generate(p, max_tokens=6, sampling=GREEDY) for p in prompts)):
            check(reference(glm[0]), request)
        weights = list(read_safetensors(glm[1]))
        assert any(".experts.0." in name for name, _ in weights), "a checkpoint names experts one by one"
        await engine.update_weights(1, weights)
        request = await engine.generate(prompts[0], max_tokens=6, sampling=GREEDY)
        assert (request.cached, request.versions) == (0, (1, 1))
        check(reference(glm[1]), request)


@pytest.mark.fault("SYN-05")
async def test_an_update_of_experts_that_lacks_one_changes_nothing(start, reference, glm):
    from rlcore.errors import ConfigError

    async with start(glm[0]) as engine:
        weights = [pair for pair in read_safetensors(glm[1]) if ".experts.2.up_proj" not in pair[0]]
        with pytest.raises(ConfigError):
            await engine.update_weights(1, weights)
        assert engine.version == 0
        check(reference(glm[0]), await engine.generate([5, 6, 7], max_tokens=6, sampling=GREEDY))
