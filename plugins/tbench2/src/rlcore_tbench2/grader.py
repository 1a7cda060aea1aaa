"""The grader of task folders: the task's own tests, run in the sandbox that the agent left behind."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError, VerifierUnavailable
from rlcore.protocols import Sandbox
from rlcore.types import ExecResult, Task, Trajectory, Verdict

from rlcore_tbench2.env import filled
from rlcore_tbench2.rewards import MAX_BYTES, RewardError, parse_json, parse_text
from rlcore_tbench2.stage import put_folder, root_exec

__all__ = ["TaskGrader"]

LOGS = "/logs/verifier"
TESTS = "/tests"
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN_ENV = {"PYTHONNOUSERSITE": "1", "BASH_ENV": "", "ENV": "", "PYTHONSTARTUP": ""}
"""Doors through which files that the agent wrote could run inside the verifier."""


END_PROCESSES = r"""
stat_of() { read -r line < "/proc/$1/stat"; set -- ${line##*) }; parent=$2 started=${20}; }
stat_of 1; first=$started
keep=" 1 "; pid=$$
while [ "$pid" -gt 1 ]; do keep="$keep$pid "; stat_of "$pid"; pid=$parent; done
for pass in 1 2 3 4 5; do
  ended=
  for entry in /proc/[0-9]*; do
    pid=${entry#/proc/}
    case $keep in *" $pid "*) continue;; esac
    stat_of "$pid" || continue
    [ "$parent" -le 1 ] && [ $((started - first)) -lt 100 ] && continue
    kill -9 "$pid" && ended=1
  done
  [ -z "$ended" ] && break
done 2>/dev/null
"""
"""Ends every process but process 1, the caller's own line, and what an image starts beside process 1 in its first second
(the keep-alive of a container)."""


CLEAR = f"""
umask 0
is_empty() {{
  [ -d $1 ] && [ ! -L $1 ] || return 1
  for entry in $1/* $1/.[!.]* $1/..?*; do [ -e "$entry" ] || [ -L "$entry" ] && return 1; done; return 0
}}
for folder in {TESTS} {LOGS}; do
  [ -e $folder ] || [ -L $folder ] || mkdir -p $folder && is_empty $folder && continue
  chmod u+rwx /logs; chmod -R u+rwX $folder; rm -rf $folder
  [ ! -L $folder ] && mkdir -p $folder && {{ is_empty $folder || rm -rf $folder/* $folder/.[!.]* $folder/..?*; }}
done 2>/dev/null
is_empty {TESTS} && is_empty {LOGS} && chmod 777 {LOGS}
"""
"""Leaves both folders real and empty, whatever stands there; they may be mount points, which cannot go themselves. In few
processes: this runs for every attempt."""

AND_REMOVE = f'"$@"; status=$?; rm -rf {TESTS} 2>/dev/null; exit $status'


class TaskGrader:
    """Stages ``tests/`` for the verify window, runs ``test.sh`` in the working directory, reads what it wrote.

    Nothing of an earlier verdict counts: ``/tests`` and ``/logs/verifier`` are wiped right before, the tests come from
    the task folder on this side, ``solution/`` never leaves it, and standard output is never searched for a verdict. A
    missing, empty or malformed verdict is ``VerifierUnavailable``; a complete one counts whatever the exit status, also
    if the time ran out after it was written.
    """

    class Config(BaseModel):
        """Options of the ``tbench2`` grader."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        reward_key: str = Field("reward", description="the key of reward.json that is the reward")
        log_chars: int = Field(2000, ge=0, description="characters of the verifier's log that are kept (its end)")
        end_processes: bool | None = Field(
            None,
            description="end what the agent left running before the tests start; default: only where the task says "
            "so (metadata.rlcore.end_processes), because tests may need a service that the agent started",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    async def grade(self, task: Task, sandbox: Sandbox | None, trajectory: Trajectory) -> Verdict:
        """The verdict; see :class:`rlcore.protocols.Grader`."""
        if sandbox is None or "tests" not in task.data:
            raise ConfigError(
                f"grader 'tbench2': task {task.id} is no task folder with a sandbox; use taskset 'tbench2'"
            )
        tests = Path(task.data["tests"])
        command = _command(tests / "test.sh")
        await self._clear(task, sandbox)
        await put_folder(sandbox, tests, TESTS)
        result = await self._run(command, task, sandbox)
        if result.timed_out or task.data.get("verifier_user") is not None:
            await root_exec(sandbox, f"rm -rf {TESTS} 2>/dev/null; true", task, what="removing the tests")
        try:
            reward, info = await self._read(sandbox)
        except RewardError as error:
            log = self._log(result)
            trajectory.info["verifier"] = log
            raise VerifierUnavailable(f"task {task.id}: {error} ({_how(result)}); log ends: {log['log']!r}") from error
        return Verdict(reward, info={"verifier": self._log(result), **info})

    async def _clear(self, task: Task, sandbox: Sandbox) -> None:
        script = CLEAR
        end = self.config.end_processes
        if task.data.get("end_processes", False) if end is None else end:
            script = END_PROCESSES + script
        await root_exec(sandbox, script, task, what="clearing /tests and /logs/verifier")

    async def _run(self, command: list[str], task: Task, sandbox: Sandbox) -> ExecResult:
        spec = task.sandbox
        env = dict(CLEAN_ENV)
        if spec is None or (spec.image is None and spec.build_context is None):
            env["PATH"] = STANDARD_PATH
        env |= filled(task.data.get("verifier_env", {}), f"{task.id}: verifier.env")
        return await sandbox.exec(
            ["/bin/sh", "-c", AND_REMOVE, "sh", *command],
            timeout=task.verifier_seconds,
            cwd=spec.workdir if spec else None,
            env=env,
            user=task.data.get("verifier_user"),
            max_output=max(4 * self.config.log_chars, 1024),
        )

    async def _read(self, sandbox: Sandbox) -> tuple[float, dict[str, Any]]:
        data = await _content(sandbox, f"{LOGS}/reward.json")
        if data is None:
            data = await _content(sandbox, f"{LOGS}/reward.txt")
            if data is None:
                raise RewardError("the tests wrote neither reward.json nor reward.txt")
            return parse_text(data), {}
        rewards = parse_json(data)
        if self.config.reward_key not in rewards:
            known = ", ".join(rewards) or "no key"
            raise RewardError(f"reward.json has no {self.config.reward_key!r} (it has {known}); set grader.reward_key")
        return rewards[self.config.reward_key], {"rewards": rewards}

    def _log(self, result: ExecResult) -> dict[str, Any]:
        text = "\n".join(part.strip("\n") for part in (result.stdout, result.stderr) if part.strip())
        return {
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "seconds": round(result.seconds, 3),
            "log": text[len(text) - self.config.log_chars :] if len(text) > self.config.log_chars else text,
        }


def _command(script: Path) -> list[str]:
    """How the test script is started: by its own interpreter, whatever its mode became on the way here."""
    first = script.read_bytes()[:200].split(b"\n")[0].strip()
    interpreter = shlex.split(first[2:].decode("utf-8", "replace")) if first.startswith(b"#!") else []
    if not interpreter:
        return ["/bin/sh", "-c", f"exec $(command -v bash || echo sh) {TESTS}/test.sh"]
    return [*interpreter, f"{TESTS}/test.sh"]


async def _content(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read_file(path, max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return None
    except (IsADirectoryError, PermissionError, ValueError) as error:
        raise RewardError(f"{path}: {error}") from error


def _how(result: ExecResult) -> str:
    return "the verifier timed out" if result.timed_out else f"exit code {result.exit_code}"
