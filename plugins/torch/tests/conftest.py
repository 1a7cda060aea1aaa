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


@pytest.fixture
def objective():
    """``objective(correction=…, loss=…, aggregation=…)``; by default token TIS, the clipped surrogate, token mean."""
    from rlcore.protocols import Objective
    from rlcore_losses.aggregations import TokenMean
    from rlcore_losses.corrections import TokenTIS
    from rlcore_losses.losses import PPOClip

    def of(correction=None, loss=None, aggregation=None) -> Objective:
        return Objective(
            correction or TokenTIS(TokenTIS.Config()),
            loss or PPOClip(PPOClip.Config()),
            aggregation or TokenMean(TokenMean.Config()),
        )

    return of


@pytest.fixture
async def start(context):
    """``await start(folder, lr=…, …)``: a started trainer, closed at the end."""
    from rlcore_torch.trainer import TorchTrainer

    started = []

    async def trainer(folder: Path, dtype: str = "float32", **options) -> TorchTrainer:
        options.setdefault("lr", 1e-3)
        made = TorchTrainer(TorchTrainer.Config(**options))
        started.append(made)
        await made.start(context(folder, dtype))
        return made

    yield trainer
    for made in started:
        await made.aclose()


@pytest.fixture
def gradients(context):
    """``gradients(folder, batch, objective, **options)``: the divided gradient of a step, the log-probs and metrics."""
    import threading

    from rlcore_torch.trainer import TorchTrainer
    from rlcore_torch.worker import Worker

    def of(folder: Path, batch: Batch, objective, **options):
        worker = Worker(TorchTrainer.Config(**options), context(folder))
        found: dict[str, torch.Tensor] = {}

        def keep(lr: float, scale: float) -> None:
            if worker.optimizer._sums:
                worker.optimizer.accumulate()
            for name, parameter in worker.optimizer.parameters.items():
                found[name] = worker.optimizer._sums.get(name, parameter.grad) * scale

        worker.optimizer.step = keep
        result = worker.step(batch, objective, threading.Event())
        return found, result

    return of
