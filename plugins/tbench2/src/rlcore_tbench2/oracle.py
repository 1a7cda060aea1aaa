"""Each task's own solution through sandbox and grader: the proof that a task can be solved here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from rlcore.errors import ConfigError, InfraError, RlcoreError, TaskError, Throttled, VerifierUnavailable
from rlcore.protocols import Grader, Sandbox
from rlcore.types import SandboxSpec, Task, Trajectory

from rlcore_tbench2.env import filled
from rlcore_tbench2.folder import content_hash
from rlcore_tbench2.schema import parse_task_toml
from rlcore_tbench2.stage import prepare, put_folder, root_exec

__all__ = ["run_oracle"]

OpenSandbox: TypeAlias = Callable[[SandboxSpec, str], AbstractAsyncContextManager[Sandbox]]

ATTEMPTS = 3
"""Tries of one task while the infrastructure fails, each on a fresh sandbox."""
SOLUTION = "/solution"


async def run_oracle(
    tasks: Sequence[Task],
    open_sandbox: OpenSandbox,
    grader: Grader,
    *,
    concurrency: int = 4,
    wrong: bool = False,
    out: Path | None = None,
    timeout: float = 3600.0,
    on_result: Callable[[Mapping[str, Any], int], None] = lambda row, done: None,
) -> list[dict[str, Any]]:
    """One row per task, in the order of ``tasks``.

    Args:
        tasks: of task set ``tbench2``.
        open_sandbox: leases a sandbox for a task.
        grader: gives the verdict.
        concurrency: sandboxes at the same time.
        wrong: run ``solution/wrong.sh``; a row is then ok if it does not pass.
        out: JSON lines, appended as results come; rows of unchanged tasks with a verdict are not run again.
        timeout: seconds for a solution whose task states no clock.
        on_result: called with each row and the number of rows so far.
    """
    script = "wrong.sh" if wrong else "solve.sh"
    known = _read(out, script) if out is not None else {}
    rows: dict[str, dict[str, Any]] = {}
    slots = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> None:
        digest = content_hash(Path(task.data["folder"]))
        row = known.get((task.id, digest))
        if row is None:
            async with slots:
                row = {
                    "task": task.id,
                    "hash": digest,
                    "script": script,
                    **await _run(task, open_sandbox, grader, script, timeout),
                }
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        solved = row["reward"] is not None and row["reward"] >= 1
        rows[task.id] = {**row, "ok": row["reward"] is not None and solved is not wrong}
        on_result(rows[task.id], len(rows))

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(one(task))
    return [rows[task.id] for task in tasks]


async def _run(task: Task, open_sandbox: OpenSandbox, grader: Grader, script: str, timeout: float) -> dict[str, Any]:
    """The row of one task; what the infrastructure ended is tried again on a fresh sandbox."""
    started = monotonic()
    row: dict[str, Any] = {}
    for _ in range(ATTEMPTS):
        try:
            row = await _attempt(task, open_sandbox, grader, script, timeout)
            break
        except (RlcoreError, OSError) as error:
            row = {"reward": None, "error": f"{type(error).__name__}: {error}"}
            if not isinstance(error, InfraError) or isinstance(error, VerifierUnavailable | Throttled):
                break
    return {**row, "seconds": round(monotonic() - started, 3)}


async def _attempt(
    task: Task, open_sandbox: OpenSandbox, grader: Grader, script: str, timeout: float
) -> dict[str, Any]:
    folder = Path(task.data["folder"])
    if not (folder / "solution" / script).is_file():
        raise TaskError(f"{folder / 'solution' / script}: missing")
    if task.sandbox is None:
        raise TaskError(f"{task.id}: no sandbox")
    async with open_sandbox(task.sandbox, task.id) as sandbox:
        await prepare(task, sandbox)
        result = await _solve(task, sandbox, folder, script, timeout)
        trajectory = Trajectory(id=task.id, task_id=task.id, group_id=task.id)
        verdict = await grader.grade(task, sandbox, trajectory)
    return {"reward": verdict.reward, "error": None if verdict.reward >= 1 else result, "info": dict(verdict.info)}


async def _solve(task: Task, sandbox: Sandbox, folder: Path, script: str, timeout: float) -> str:
    """Run the solution; says how it went, for tasks whose tests then fail."""
    file = parse_task_toml((folder / "task.toml").read_bytes(), str(folder / "task.toml"))
    await put_folder(sandbox, folder / "solution", SOLUTION)
    result = await sandbox.exec(
        ["/bin/sh", "-c", f"exec $(command -v bash || echo sh) {SOLUTION}/{script}"],
        timeout=task.agent_seconds or timeout,
        cwd=task.sandbox.workdir if task.sandbox else None,
        env=filled(file.solution_env, f"{task.id}: solution.env", task.data["host_env"]),
    )
    await root_exec(
        sandbox, f"rm -rf {SOLUTION} 2>/dev/null || rm -rf {SOLUTION}/*", task, what="removing the solution"
    )
    how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    return f"solution: {how}; {(result.stderr or result.stdout)[-300:].strip()}"


def _read(path: Path, script: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows with a verdict; a last line that was cut by a crash is dropped."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if path.is_file():
        text = path.read_text("utf-8")
        if text and not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]
            path.write_text(text, "utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
                if row["script"] == script and row["reward"] is not None:
                    rows[row["task"], row["hash"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: not a result of `rlcore tasks oracle`") from error
    return rows
