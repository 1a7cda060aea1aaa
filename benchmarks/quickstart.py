"""The quickstart against TRL and transformers on this machine: ``python benchmarks/quickstart.py [--json]``.

The same model, prompts, group size, lengths and learning rate go through TRL's GRPOTrainer (in an environment of its own,
``.venv-trl``, made on the first call) and through rlcore, one step of each in turn. rlcore runs every answer in a sandbox
and grades it there; TRL compares strings. Every group is trained, also those with equal rewards. Then tokens per second
of sixteen sequences: the embedded engine against ``generate``. Writes ``results/quickstart.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side_env import ensure

HERE = Path(__file__).parent

GROUP, NEW_TOKENS, LEARNING_RATE = 8, 20, 4e-5
KINDS = ("write", "copy", "touch", "upper", "grep")
"""Kinds that one answer solves: TRL's trainer plays a single turn."""
DECODE_ROWS, DECODE_TOKENS = 16, 64


class Worker:
    """A process that takes one step when it is told to and says how long it took."""

    def __init__(self, command: list[Any], **options: Any) -> None:
        arguments = [str(part) for part in command] + [json.dumps(options)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self._answer()

    def step(self) -> dict[str, Any]:
        """Take one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self.log.seek(0)
        raise SystemExit(f"a worker ended early:\n{self.log.read()[-4000:]}")

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.log.close()


def say(message: dict[str, Any]) -> None:
    """From a worker to its parent."""
    print(f"@{json.dumps(message)}", flush=True)


# --- our side ---------------------------------------------------------------------------------------------------------


def resolved(tasks: int, steps: int, run_dir: str) -> tuple[Any, Any]:
    """The plugins and the quickstart's configuration for one size."""
    from rlcore.plugins import load_plugins
    from rlcore.resolve import resolve, set_layer

    plugins = load_plugins()
    settings = [
        f"run.dir={run_dir}",
        "run.id=bench",
        f"run.steps={steps}",
        "run.checkpoint_every=0",
        f"recipe.kinds={json.dumps(KINDS)}",
        f"rollout.tasks_per_step={tasks}",
        f"rollout.samples_per_task={GROUP}",
        f"budget.tokens_per_turn={NEW_TOKENS}",
        f"trainer.lr={LEARNING_RATE}",
        "advantage.keep_equal=true",
        "eval.before_and_after=false",
    ]
    return plugins, resolve(plugins, [set_layer(settings)], "quickstart")


class Turnstile:
    """A progress display that waits for the parent before each step."""

    used = 0.0

    def phase(self, text: str) -> None:
        """Wait where a step begins."""
        if text == "step 1: rollout":
            say({"ready": True})
            sys.stdin.readline()
            self.used = _cpu_seconds()

    def step(self, step: int, metrics: Any) -> None:
        """Report a step, and wait for the next."""
        used = _cpu_seconds()
        say({**metrics, "cpu_seconds": used - self.used})
        sys.stdin.readline()
        self.used = _cpu_seconds()

    def attempt(self, trajectory: Any) -> None:
        """Not shown."""

    def evaluated(self, when: str, evaluation: Any) -> None:
        """Not shown."""

    def alarm(self, alarm: Any) -> None:
        """Shown on the error stream."""
        print(alarm, file=sys.stderr)


def _cpu_seconds() -> float:
    """CPU time of this process and of the sandboxes that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def ours(options: dict[str, Any]) -> None:
    """The worker of rlcore's side."""
    from rlcore.loop import train
    from rlcore.record.directory import RunDirectory
    from rlcore.record.manifest import manifest

    with tempfile.TemporaryDirectory() as folder:
        plugins, found = resolved(options["tasks"], options["steps"] + 1, folder)
        found.recipe.prepare(found.config)
        record = manifest("quickstart", found.config.model_dump(mode="json"), plugins.provenance())
        directory = RunDirectory.create(Path(folder) / "bench", record)
        asyncio.run(train(found.config, plugins, directory, Turnstile()))


def decode(options: dict[str, Any]) -> None:
    """The worker that decodes on both sides: the engine, then ``generate`` in float32 and in bfloat16."""
    import torch
    from rlcore.types import RunContext, Sampling
    from rlcore_engine.engine import EmbeddedEngine
    from transformers import AutoModelForCausalLM

    _, found = resolved(2, 1, ".")
    path = found.config.model.path
    prompts = [ids[: min(map(len, options["ids"]))] for ids in options["ids"]]
    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")
    }

    def generate(model: Any) -> float:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=DECODE_TOKENS,
                max_new_tokens=DECODE_TOKENS,
                pad_token_id=0,
            )
        assert out.shape[1] == len(prompts[0]) + DECODE_TOKENS
        return len(prompts) * DECODE_TOKENS / (time.perf_counter() - started)

    async def main() -> None:
        engine = EmbeddedEngine(EmbeddedEngine.Config())
        await engine.start(RunContext("bench", Path(), 0, found.config.model.model_dump()))

        async def embedded() -> float:
            await engine.flush()
            started = time.perf_counter()
            made = await asyncio.gather(
                *(
                    engine.generate(ids, max_tokens=DECODE_TOKENS, sampling=Sampling(), ignore_stops=True)
                    for ids in prompts
                )
            )
            assert all(len(one.out) == DECODE_TOKENS for one in made)
            return len(prompts) * DECODE_TOKENS / (time.perf_counter() - started)

        say({"ready": True})
        for _ in range(options["steps"]):
            sys.stdin.readline()
            say({"embedded": await embedded(), **{name: generate(model) for name, model in models.items()}})
        sys.stdin.readline()

    asyncio.run(main())


# --- the comparison ---------------------------------------------------------------------------------------------------


def questions() -> tuple[str, list[dict[str, Any]], list[list[int]]]:
    """The model, the tasks for TRL (messages and the right answer), and sixteen prompts as ids."""
    from rlcore_policies.tokenizer import load_renderer

    plugins, found = resolved(2, 1, ".")
    found.recipe.prepare(found.config)
    tasks = plugins.load("taskset", found.config.taskset.name)(found.config.taskset.options).load()
    rows = []
    for task in tasks:
        solution = (Path(task.data["folder"]) / "solution" / "solve.sh").read_text("utf-8")
        rows.append({"prompt": [m.to_dict() for m in task.messages], "answer": solution.splitlines()[-1]})
    path = found.config.model.path
    renderer = load_renderer(path)
    step = max(len(tasks) // DECODE_ROWS, 1)
    return path, rows, [renderer.render(task.messages) for task in tasks[::step]][:DECODE_ROWS]


def trl(python: Path, path: str, data: Path, tasks: int, steps: int, dtype: str) -> Worker:
    """A worker of TRL's side."""
    options = {"model": path, "data": str(data), "tasks": tasks, "group": GROUP, "new_tokens": NEW_TOKENS}
    return Worker([python, HERE / "trl_worker.py"], **options, lr=LEARNING_RATE, steps=steps, dtype=dtype)


def compare(python: Path, path: str, data: Path, tasks: int, steps: int, dtype: str) -> dict[str, Any]:
    """Steps of both sides in turn, the first of each not counted."""
    mine = Worker([sys.executable, __file__, "--worker", "ours"], tasks=tasks, steps=steps)
    theirs = trl(python, path, data, tasks, steps + 1, dtype)
    rows = []
    for number in range(steps + 1):
        ours_, theirs_ = mine.step(), theirs.step()
        print(f"  {tasks} x {GROUP}: rlcore {ours_['seconds']:.2f} s, TRL {theirs_['seconds']:.2f} s", file=sys.stderr)
        if number:
            rows.append((ours_, theirs_))
    mine.close()
    theirs.close()
    seconds = [[row[side]["seconds"] for row in rows] for side in (0, 1)]
    cpu = [statistics.median(row[side]["cpu_seconds"] for row in rows) for side in (0, 1)]
    parts = ("seconds/rollout", "seconds_forward", "seconds_backward", "seconds_optimizer", "seconds/sync")
    return {
        "tasks": tasks,
        "samples": GROUP,
        "rlcore_seconds": [round(s, 2) for s in seconds[0]],
        "trl_seconds": [round(s, 2) for s in seconds[1]],
        "rlcore_median": statistics.median(seconds[0]),
        "trl_median": statistics.median(seconds[1]),
        "times_faster": statistics.median(seconds[1]) / statistics.median(seconds[0]),
        "rlcore_cpu_seconds": cpu[0],
        "trl_cpu_seconds": cpu[1],
        "times_less_cpu": cpu[1] / cpu[0],
        "rlcore_parts": {part: statistics.mean(row[0][part] for row in rows) for part in parts if part in rows[0][0]},
        "positions": [row[0].get("positions") for row in rows],
        "positions_without_sharing": [row[0].get("positions_plain") for row in rows],
    }


def main() -> int:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each size")
    parser.add_argument("--trl-dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=["ours", "decode"], help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        {"ours": ours, "decode": decode}[arguments.worker](json.loads(arguments.options))
        return 0

    python = ensure()
    path, rows, ids = questions()
    report: dict[str, Any] = {"machine": {"cpu": _cpu(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tasks.json"
        data.write_text(json.dumps(rows))
        report["trl_dtype_seconds"] = {}
        dtype = arguments.trl_dtype
        if dtype == "auto":
            for name in ("float32", "bfloat16"):
                worker = trl(python, path, data, 2, 3, name)
                report["trl_dtype_seconds"][name] = [round(worker.step()["seconds"], 2) for _ in range(3)][1:]
                worker.close()
            dtype = min(report["trl_dtype_seconds"], key=lambda name: min(report["trl_dtype_seconds"][name]))
        report["trl_dtype"] = dtype
        report["steps"] = [compare(python, path, data, tasks, arguments.steps, dtype) for tasks in (2, 4)]
    worker = Worker([sys.executable, __file__, "--worker", "decode"], ids=ids, steps=4)
    speeds = [worker.step() for _ in range(4)][1:]
    worker.close()
    median = {name: statistics.median(speed[name] for speed in speeds) for name in speeds[0]}
    best = max(median["float32"], median["bfloat16"])
    report["decode"] = {"rows": len(ids), "tokens_per_second": median, "times_faster": median["embedded"] / best}
    results = HERE / "results" / "quickstart.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if arguments.json else _table(report))
    return 0


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _table(report: dict[str, Any]) -> str:
    lines = [f"seconds per optimizer step (medians; TRL in {report['trl_dtype']}, rlcore with its sandboxes)"]
    for size in report["steps"]:
        lines.append(
            f"  {size['tasks']} x {size['samples']}: rlcore {size['rlcore_median']:.2f}, TRL {size['trl_median']:.2f}: "
            f"{size['times_faster']:.1f} times (CPU time: {size['rlcore_cpu_seconds']:.1f}, {size['trl_cpu_seconds']:.1f}: "
            f"{size['times_less_cpu']:.1f} times)"
        )
        parts = ", ".join(
            f"{name.split('/')[-1].removeprefix('seconds_')} {s:.2f}" for name, s in size["rlcore_parts"].items()
        )
        lines.append(f"         rlcore's seconds: {parts}")
    decode = report["decode"]
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in decode["tokens_per_second"].items())
    lines.append(f"tokens per second, {decode['rows']} rows: {speeds}: {decode['times_faster']:.1f} times generate")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
