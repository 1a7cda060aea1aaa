"""The log-prob head and the losses on this machine: ``python benchmarks/loss.py [--json]``.

(a) The head, forward and backward in float32 (``--dtype bfloat16`` on a GPU), for the same tensors in one run, one way
after the other in every round, each run in a fresh process: plain ``log_softmax``, the way TRL computes it
(``trl.trainer.utils.selective_log_softmax``, TRL in an environment of its own), ours, and ours fused with a per-token
loss. Time is of this process on its threads (``cpu``, which other work on the machine disturbs least) and of the wall;
memory is the peak above inputs and gradients. (b) Correction and loss for 262,144 tokens in 512 ragged rows, against the
head's forward on 4,096 tokens. (c) Their time per token at a million tokens against 16 thousand. Writes
``results/loss-DEVICE.json``; exit status 1 if a target is missed.

No GPU was at hand when this was written: ``results/`` has figures of a CPU alone, and what runs only on a GPU (the
bfloat16 products with float32 sums) was not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WAYS = ("plain", "trl", "ours", "fused")
SIZES = ((576, 49_152), (576, 154_880), (2048, 49_152))
TOKENS = 4096
TARGETS = {"memory": 1 / 8, "ours": 1.25, "fused": 1.0, "objective": 0.05, "growth": 1.3}


def tensors(tokens: int, hidden: int, vocabulary: int, options: Any) -> dict[str, Any]:
    """Hidden states, embedding, targets and a slope for each token."""
    import torch

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        made = torch.randn(*shape, generator=generator) * scale
        return made.to(options.device, dtype).requires_grad_()

    return {
        "hidden": normal(tokens, hidden),
        "weight": normal(vocabulary, hidden, scale=hidden**-0.5),
        "targets": torch.randint(0, vocabulary, (tokens,), generator=generator).to(options.device),
        "slopes": torch.randn(tokens, generator=generator).to(options.device),
    }


def way(name: str) -> Callable[..., Any]:
    """Loss Σ slope_t · logprob_t of the tensors, ready for ``backward``."""
    import torch
    from rlcore_losses.logprob_head import fused_loss, selective_logprobs

    def plain(hidden: Any, weight: Any, targets: Any, slopes: Any) -> Any:
        every = torch.log_softmax((hidden @ weight.t()).float(), -1)
        return (every.gather(1, targets[:, None]).squeeze(1) * slopes).sum()

    def trl(hidden: Any, weight: Any, targets: Any, slopes: Any) -> Any:
        from trl.trainer.utils import selective_log_softmax

        rows = 8
        logits = (hidden @ weight.t()).view(rows, -1, weight.shape[0])
        return (selective_log_softmax(logits, targets.view(rows, -1)).flatten() * slopes).sum()

    def ours(hidden: Any, weight: Any, targets: Any, slopes: Any) -> Any:
        return (selective_logprobs(hidden, weight, targets) * slopes).sum()

    def fused(hidden: Any, weight: Any, targets: Any, slopes: Any) -> Any:
        return fused_loss(hidden, weight, targets, lambda lp, part: (lp * slopes[part]).sum())[0]

    return {"plain": plain, "trl": trl, "ours": ours, "fused": fused}[name]


def timed(run: Callable[[], Any], device: str) -> dict[str, float]:
    """Seconds of the wall and of this process."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wait()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def head_once(name: str, hidden: int, vocabulary: int, options: Any) -> dict[str, float]:
    """One forward and backward in this process: seconds, and MiB at the peak above inputs and gradients."""
    import torch

    run = way(name)
    run(**tensors(16, 8, 64, options)).backward()  # what the first call of an operation loads is nobody's cost
    given = tensors(options.tokens, hidden, vocabulary, options)
    gradients = sum(given[k].numel() * given[k].element_size() for k in ("hidden", "weight"))
    on_gpu = options.device != "cpu"
    if on_gpu:
        run(**given).backward()
        given["hidden"].grad = given["weight"].grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = 1024 * status("VmRSS")
    seconds = timed(lambda: run(**given).backward(), options.device)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * status("VmHWM")
    return {**seconds, "mib": (peak - before - gradients) / 2**20}


def status(key: str) -> int:
    """KiB, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def objective_time(tokens: int, rows: int, options: Any) -> dict[str, float]:
    """Token TIS, token mean and the clipped loss, forward and backward, over ragged rows; the best of seven."""
    import torch
    from rlcore.types import MicroBatch
    from rlcore_losses.aggregations import TokenMean
    from rlcore_losses.corrections import TokenTIS
    from rlcore_losses.losses import PPOClip

    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: rows - 1].sort().values + 1
    bounds = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).int()
    old = -torch.rand(tokens, generator=generator) * 3
    zeros = torch.zeros(tokens, dtype=torch.int32)
    numbers = torch.arange(rows, dtype=torch.int32)
    batch = MicroBatch(
        token_ids=zeros.long(),
        mask=torch.rand(tokens, generator=generator) < 0.7,
        rollout_logprobs=old + torch.randn(tokens, generator=generator) * 0.1,
        advantages=torch.randn(tokens, generator=generator),
        turn_ids=zeros,
        versions=zeros,
        cu_seqlens=bounds,
        row_groups=numbers // 8,
        row_trajectories=numbers,
        old_logprobs=old,
    ).map(lambda array: array.to(options.device))
    logprobs = (batch.old_logprobs + 0.01).requires_grad_()
    correction, aggregation, loss = (cls(cls.Config()) for cls in (TokenTIS, TokenMean, PPOClip))

    def run() -> None:
        logprobs.grad = None
        corrected = correction(batch.old_logprobs, batch)
        weights, _ = aggregation(corrected.counted, batch)
        loss(logprobs, batch, corrected, weights).loss.backward()

    runs = [timed(run, options.device) for _ in range(8)][1:]
    return {clock: min(row[clock] for row in runs) for clock in ("wall", "cpu")}


def head_forward(options: Any) -> dict[str, float]:
    """The head's forward on 4,096 tokens at hidden 576 and V = 49,152; the best of three."""
    import torch
    from rlcore_losses.logprob_head import selective_logprobs

    given = tensors(TOKENS, 576, 49_152, options)
    with torch.no_grad():
        runs = [
            timed(lambda: selective_logprobs(given["hidden"], given["weight"], given["targets"]), options.device)
            for _ in range(4)
        ][1:]
    return {clock: min(row[clock] for row in runs) for clock in ("wall", "cpu")}


def inside(options: Any) -> dict[str, Any]:
    """Everything, in the environment that has both sides."""
    import torch

    torch.set_num_threads(options.threads)
    if options.once:
        name, hidden, vocabulary = options.once
        return head_once(name, int(hidden), int(vocabulary), options)
    ways = [name for name in WAYS if name != "trl" or not options.no_trl]
    clock = "cpu" if options.device == "cpu" else "wall"
    report: dict[str, Any] = {
        "machine": machine(options),
        "tokens": options.tokens,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "head": [],
    }
    for hidden, vocabulary in SIZES:
        if options.only and vocabulary not in options.only:
            continue
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name in ways:
                runs[name].append(again(["--once", name, str(hidden), str(vocabulary)], options))
                print(hidden, vocabulary, name, runs[name][-1], file=sys.stderr, flush=True)
        middle = {n: {k: statistics.median(run[k] for run in of) for k in of[0]} for n, of in runs.items()}
        report["head"].append(
            {
                "hidden": hidden,
                "vocabulary": vocabulary,
                "measured": middle,
                "time_over_plain": {name: middle[name][clock] / middle["plain"][clock] for name in ways},
                "memory_over_plain": {name: middle[name]["mib"] / middle["plain"]["mib"] for name in ways},
            }
        )
    forward, objective = head_forward(options), objective_time(262_144, 512, options)
    small, large = objective_time(16_384, 32, options), objective_time(1_048_576, 2048, options)
    report["objective"] = {"seconds": objective, "head_forward": forward, "share": objective[clock] / forward[clock]}
    report["growth"] = {
        "at_16k": small,
        "at_1m": large,
        "per_token": large[clock] / 1_048_576 / (small[clock] / 16_384),
    }
    report["missed"] = missed(report)
    return report


def missed(report: dict[str, Any]) -> list[str]:
    """Targets that do not hold; the head's are for hidden 576."""
    found = []
    for row in report["head"]:
        if row["hidden"] != 576:
            continue
        for name in ("ours", "fused"):
            where = f"{name} at V={row['vocabulary']}"
            if row["memory_over_plain"][name] > TARGETS["memory"]:
                found.append(f"memory of {where}: {row['memory_over_plain'][name]:.3f} of plain")
            if row["time_over_plain"][name] > TARGETS[name]:
                found.append(f"time of {where}: {row['time_over_plain'][name]:.3f} of plain")
    if report["objective"]["share"] > TARGETS["objective"]:
        found.append(f"correction and loss: {report['objective']['share']:.3f} of the head's forward")
    if report["growth"]["per_token"] > TARGETS["growth"]:
        found.append(f"growth: {report['growth']['per_token']:.2f}")
    return found


def machine(options: Any) -> dict[str, Any]:
    """What it was measured on, and how busy that was."""
    import torch

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
    }


def again(extra: list[str], options: Any, python: str = sys.executable) -> dict[str, Any]:
    """This script once more, in a fresh process."""
    command = [python, __file__, "--inside", "--threads", str(options.threads), "--rounds", str(options.rounds)]
    command += ["--device", options.device, "--dtype", options.dtype, "--tokens", str(options.tokens)]
    command += ["--no-trl"] * options.no_trl + [f"--only={v}" for v in options.only] + extra
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def text(report: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{report['machine']}", f"{report['tokens']} tokens, {report['dtype']}, forward and backward"]
    for row in report["head"]:
        lines.append(f"hidden {row['hidden']}, V = {row['vocabulary']:,}")
        for name, found in row["measured"].items():
            lines.append(
                f"  {name:<6} cpu {found['cpu']:7.2f} s  wall {found['wall']:7.2f} s  {row['time_over_plain'][name]:5.2f} of plain"
                f"   peak {found['mib']:8.0f} MiB  {row['memory_over_plain'][name]:6.3f} of plain"
            )
    part, growth = report["objective"], report["growth"]
    lines.append(
        f"correction and loss, 262,144 tokens: {1000 * part['seconds']['cpu']:.0f} ms, {part['share']:.1%} of the head's forward"
    )
    lines.append(f"time per token at 1M over 16k: {growth['per_token']:.2f}")
    lines += [f"MISSED {line}" for line in report["missed"]] or ["every target holds"]
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", type=int, action="append", default=[], help="only this vocabulary; may be repeated")
    parser.add_argument("--no-trl", action="store_true", help="without TRL and its environment")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter that has TRL and this environment's packages")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(options)))
        return 0
    python = sys.executable
    if not options.no_trl:
        from side_env import ensure

        python = options.trl or str(ensure())
    report = again([], options, python)
    if options.tokens == TOKENS and not options.only:
        results = HERE / "results"
        results.mkdir(exist_ok=True)
        (results / f"loss-{options.device.partition(':')[0]}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
