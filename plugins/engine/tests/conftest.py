"""Models and engines that the tests share."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from rlcore.types import RunContext
from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.testing import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny random models by family."""
    root = tmp_path_factory.mktemp("models")
    return {family: tiny_model(root / family, family) for family in ("llama", "qwen2", "gpt_neox")}


@pytest.fixture
def start(models, tmp_path):
    """``async with start(family_or_folder, **options) as engine``."""

    @asynccontextmanager
    async def started(model="llama", *, dtype="float32", seed=0, **options):
        folder = models.get(model, model)
        engine = EmbeddedEngine(EmbeddedEngine.Config(threads=1, **options))
        await engine.start(RunContext("run", tmp_path, seed, {"path": str(folder), "dtype": dtype}))
        try:
            yield engine
        finally:
            await engine.aclose()

    return started


@pytest.fixture
def reference(models):
    """The model of transformers in float32."""
    from transformers import AutoModelForCausalLM

    loaded = {}

    def load(model="llama"):
        folder = Path(models.get(model, model))
        if folder not in loaded:
            loaded[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return loaded[folder]

    return load


async def _until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def until():
    """``await until(condition)``: polls, bounded."""
    return _until
