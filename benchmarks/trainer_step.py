"""Seconds of one trainer step of SmolLM2-135M and where they go, with and without shared prefixes.

    python benchmarks/trainer_step.py                    # 2 × 8 and 4 × 8 rows, every way to compute them
    python benchmarks/trainer_step.py --threads 1 --repeats 5 --json

A row is a prompt of about 100 tokens (a system part and two examples that all groups share, a task that its group
shares) and at most 24 tokens that the model itself sampled at temperature 1. The best of the repeats counts; CPU seconds
are of the whole process.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
from pathlib import Path

import torch
from rlcore.protocols import Objective
from rlcore.types import Batch, RunContext, Sample
from rlcore_engine.models import load_model
from rlcore_engine.testing import smollm2
from rlcore_losses.aggregations import TokenMean
from rlcore_losses.corrections import TokenTIS
from rlcore_losses.losses import PPOClip
from rlcore_torch.memory import keep_freed_memory
from rlcore_torch.trainer import TorchTrainer
from rlcore_torch.worker import Worker
from transformers import AutoTokenizer

SYSTEM = (
    "You are a shell assistant. Answer with one command.\n"
    "Task: write the word tulip to the file garden.txt\nCommand: echo tulip > garden.txt\n"
    "Task: write the word cedar to the file forest.txt\nCommand: echo cedar > forest.txt"
)
TASKS = (
    "write the word maple to the file autumn.txt",
    "rename the file draft.txt to final.txt",
    "count the lines of the file poem.txt into lines.txt",
    "copy the file apples.txt to pears.txt",
)
WAYS = {
    "shared": {},
    "plain": {"share_prefixes": False},
    "shared, transformers' forward": {},
    "plain, transformers' forward": {"share_prefixes": False},
    "shared, float32": {"dtype": "float32"},
}


def rows(groups: int, siblings: int, new: int) -> Batch:
    """Prompts, and answers that the engine sampled in bfloat16."""
    folder = smollm2()
    tokenizer, engine = AutoTokenizer.from_pretrained(folder), load_model(folder, dtype="bfloat16")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Task: {task}"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for task in TASKS[:groups]
        for _ in range(siblings)
    ]
    draw = torch.Generator().manual_seed(0)
    answers: list[list[tuple[int, float]]] = [[] for _ in prompts]
    with torch.inference_mode():
        logits = prefilled(engine, prompts)
        for _ in range(new):
            logprobs = logits.log_softmax(-1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=draw)
            for answer, token, logprob in zip(answers, chosen[:, 0].tolist(), logprobs.gather(1, chosen)[:, 0].tolist(), strict=True):  # fmt: skip
                if not answer or answer[-1][0] != tokenizer.eos_token_id:
                    answer.append((token, logprob))
            logits = engine.decode(chosen[:, 0].tolist())
    samples = []
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        before, count, group = len(prompt), len(answer), str(n // siblings)
        samples.append(
            Sample(
                trajectory_id=str(n),
                group_id=group,
                task_id=group,
                row=0,
                token_ids=[*prompt, *(token for token, _ in answer)],
                mask=[False] * before + [True] * count,
                rollout_logprobs=[math.nan] * before + [logprob for _, logprob in answer],
                advantages=[0.0] * before + [1.0 if n % 2 else -1.0] * count,
                turn_ids=[-1] * before + [0] * count,
                versions=[-1] * before + [0] * count,
                reward=float(n % 2),
            )
        )
    return Batch(samples, policy_version=0)


def prefilled(engine, prompts: list[list[int]]) -> torch.Tensor:
    """Logits behind the prompts."""
    work = engine.prefill(prompts)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value.logits


def measure(batch: Batch, way: str, threads: int, repeats: int) -> dict[str, float | str]:
    """The best of some steps after two to warm up; with a learning rate of 0, so that every step is the same."""
    objective = Objective(TokenTIS(TokenTIS.Config()), PPOClip(PPOClip.Config()), TokenMean(TokenMean.Config()))
    config = TorchTrainer.Config(lr=0.0, threads=threads, **WAYS[way])
    worker = Worker(config, RunContext("benchmark", Path(tempfile.gettempdir()), 0, {"path": str(smollm2())}))
    if "transformers" in way:
        worker.model.fast = False
    found = []
    for _ in range(repeats + 2):
        wall, cpu = time.perf_counter(), time.process_time()
        metrics = worker.step(batch, objective, threading.Event()).metrics
        found.append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, **metrics})
    best = min(found[2:], key=lambda step: step["seconds"])
    best["cpu_seconds"] = min(step["cpu_seconds"] for step in found[2:])
    kept = ("seconds", "cpu_seconds", "seconds_forward", "seconds_backward", "seconds_optimizer", "positions", "tokens",
            "abs_diff", "k3", "peak_rss_gib")  # fmt: skip
    return {"way": way, "rows": len(batch.samples), "threads": threads, **{key: best[key] for key in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    found = []
    for groups in options.groups:
        batch = rows(groups, options.siblings, options.new)
        for way in options.ways:
            found.append(measure(batch, way, options.threads, options.repeats))
            if not options.json:
                print(report(groups, options.siblings, found[-1]), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))


def report(groups: int, siblings: int, found: dict) -> str:
    parts = ", ".join(f"{part} {found[f'seconds_{part}']:.2f}" for part in ("forward", "backward", "optimizer"))
    return (
        f"{groups} x {siblings} {found['way']:30} {found['seconds']:6.2f} s ({found['cpu_seconds']:.2f} CPU): {parts}; "
        f"{found['positions']:.0f} positions, {found['tokens']:.0f} trained, gap {found['abs_diff']:.3f}, "
        f"{found['peak_rss_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    main()
