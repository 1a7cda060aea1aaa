"""Tiny random models and batches."""

import math
from pathlib import Path

import pytest
import torch
from rlcore.types import Batch, RunContext, Sample
from rlcore_engine.testing import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """``model_folder("qwen2", **overrides)``: a tiny random model, written once per session."""
    made: dict[tuple, Path] = {}

    def folder(family: str = "llama", **overrides) -> Path:
        key = (family, *sorted(overrides.items()))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(family) / "model", family, **overrides)
        return made[key]

    return folder


@pytest.fixture
def context(tmp_path):
    """``context(folder)``: the run context of a model."""

    def of(folder: Path, dtype: str = "float32") -> RunContext:
        return RunContext("test", tmp_path, 0, {"path": str(folder), "dtype": dtype})

    return of


@pytest.fixture
def make_batch():
    """``make_batch(groups=2, siblings=3, …)``: rows with a prompt per group, a common beginning, and two turns."""

    def make(
        groups: int = 2, siblings: int = 3, seed: int = 0, common: int = 8, prompt: int = 5, vocabulary: int = 259
    ) -> Batch:
        draw = torch.Generator().manual_seed(seed)

        def ids(n: int) -> list[int]:
            return torch.randint(3, vocabulary, (n,), generator=draw).tolist()

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=draw))

        system = ids(common)
        samples = []
        for group in range(groups):
            head = system + ids(prompt)
            for sibling in range(siblings):
                parts = [(head, False), (ids(number(1, 7)), True), (ids(2), False), (ids(number(1, 5)), True)]
                tokens = [token for part, _ in parts for token in part]
                mask = [trained for part, trained in parts for _ in part]
                turns = [turn for turn, (part, _) in zip((-1, 0, -1, 1), parts, strict=True) for _ in part]
                advantage = float(torch.randn(1, generator=draw))
                samples.append(
                    Sample(
                        trajectory_id=f"{group}-{sibling}",
                        group_id=str(group),
                        task_id=str(group),
                        row=0,
                        token_ids=tokens,
                        mask=mask,
                        rollout_logprobs=[-float(torch.rand(1, generator=draw)) * 8 if m else math.nan for m in mask],
                        advantages=[advantage if m else 0.0 for m in mask],
                        turn_ids=turns,
                        versions=[0 if m else -1 for m in mask],
                        reward=1.0,
                    )
                )
        return Batch(samples, policy_version=0)

    return make
