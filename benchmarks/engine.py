"""The embedded engine against transformers, on the packaged 135M model, interleaved in one process.

    python benchmarks/engine.py [--batch 16] [--new 24] [--rounds 3] [--json]

Decoding: tokens per second of CPU time (and wall clock) without prefill, which is measured apart and taken off on both
sides; ``generate_ratio`` is of the whole call, prompts included. Log-probs: what the engine sampled against a float32 forward of transformers over the same ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch
from rlcore.types import RunContext, Sampling
from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.testing import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

PLACES = [
    "Paris",
    "a small farm",
    "the harbour",
    "an old library",
    "Kyoto",
    "the desert",
    "a night train",
    "the market",
]


def prompts(tokenizer, batch):
    texts = [f"Write a short letter to a friend about {PLACES[i % len(PLACES)]}, number {i}." for i in range(batch)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


class Clock:
    """Seconds of CPU time of the process, and of wall clock."""

    def __enter__(self):
        self._began = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_):
        self.cpu, self.wall = time.process_time() - self._began[0], time.perf_counter() - self._began[1]


async def engine_run(engine, rows, new):
    await engine.flush()
    with Clock() as clock:
        done = await asyncio.gather(
            *(
                engine.generate(row, max_tokens=new, ignore_stops=True, sampling=Sampling(seed=i))
                for i, row in enumerate(rows)
            )
        )
    return clock, done


def transformers_run(model, rows, new):
    width = max(map(len, rows))
    ids = torch.tensor([[2] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode(), Clock() as clock:
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=new, max_new_tokens=new)
    return clock


async def measure(dtype, rows, arguments):
    folder = smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    engine = EmbeddedEngine(EmbeddedEngine.Config(threads=arguments.threads, slots=max(32, arguments.batch)))
    await engine.start(RunContext("bench", Path(), 0, {"path": str(folder), "dtype": dtype}))
    found = {}
    try:
        tokens = arguments.batch * (arguments.new - 1)
        best, whole = {}, {}
        for _ in range(arguments.rounds):
            for name in ("engine", "transformers"):
                seconds = []
                for new in (1, arguments.new):
                    if name == "engine":
                        clock, done = await engine_run(engine, rows, new)
                    else:
                        clock = transformers_run(model, rows, new)
                    seconds.append(clock)
                one, many = seconds
                rate = (tokens / (many.cpu - one.cpu), tokens / (many.wall - one.wall))
                best.setdefault(name, []).append((*rate, one.cpu))
                whole[name] = min(many.cpu, whole.get(name, many.cpu))
                if name == "engine":
                    last = done
        for name, rounds in best.items():
            found[name] = {
                "decode_tokens_per_cpu_s": round(max(r[0] for r in rounds), 1),
                "decode_tokens_per_s": round(max(r[1] for r in rounds), 1),
                "prefill_cpu_s": round(min(r[2] for r in rounds), 3),
            }
        found["decode_ratio"] = round(
            found["engine"]["decode_tokens_per_cpu_s"] / found["transformers"]["decode_tokens_per_cpu_s"], 2
        )
        found["generate_ratio"] = round(whole["transformers"] / whole["engine"], 2)
        found |= gaps(folder, last)
        found |= await updates(engine, folder)
    finally:
        await engine.aclose()
    return found


@torch.inference_mode()
def gaps(folder, done):
    """Distance of the engine's log-probs to those of a float32 forward, in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    distances = []
    for request in done:
        logits = model(torch.tensor([request.tokens])).logits[0, len(request.prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(request.out)[:, None])[:, 0]
        distances.append((exact - torch.tensor(request.logprobs)).abs())
    every = torch.cat(distances)
    return {"gap_mean": float(f"{every.mean():.2e}"), "gap_max": float(f"{every.max():.2e}")}


async def updates(engine, folder):
    weights = list(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict().items())
    seconds = []
    for version in range(1, 5):
        with Clock() as clock:
            await engine.update_weights(version, weights)
        seconds.append((clock.cpu, clock.wall))
    return {"update_cpu_s": round(min(s[0] for s in seconds), 3), "update_wall_s": round(min(s[1] for s in seconds), 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = prompts(AutoTokenizer.from_pretrained(smollm2()), arguments.batch)
    report = {"batch": arguments.batch, "new": arguments.new, "threads": arguments.threads}
    for dtype in ("float32", "bfloat16"):
        report[dtype] = asyncio.run(measure(dtype, rows, arguments))
        if not arguments.json:
            print(dtype, json.dumps(report[dtype], indent=2), flush=True)
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
