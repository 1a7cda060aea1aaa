"""The terminal agent loop: one shell command per turn, its output back as a message, until the model stops."""

from __future__ import annotations

import re
from math import inf

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError
from rlcore.protocols import Episode, Sandbox
from rlcore.types import AgentResult, BudgetLeft, EndReason, ExecResult, FinishReason, Message, Task

from rlcore_tbench2.stage import prepare

__all__ = ["DEFAULT_SYSTEM_PROMPT", "TerminalAgent", "parse_command"]

DEFAULT_SYSTEM_PROMPT = """\
You solve tasks in a Linux shell. In every turn, reply with exactly one shell command in one fenced block:

```bash
ls -la
```

You will see its output, then you give the next command. Every command starts in the working directory of the task; \
what you `export` or `cd` in one command is gone in the next. Commands get no input: nothing interactive. When the task \
is done, reply with TASK_COMPLETE and no block."""

STOP_WORD = "TASK_COMPLETE"

_OPENING = re.compile(r"(`{3,})[^\n`]*\n")
_INLINE = re.compile(r"(`{3,})(?:(?:bash|sh|shell)[ \t])?(.+?)\1", re.DOTALL)


def parse_command(text: str) -> str:
    """The command in a reply; ``""`` if there is none.

    With a fence, the first fenced block is the command, and a block that is never closed is none; without a fence, the
    whole reply, stripped. A reply that never stopped thinking holds no command (a session cuts off finished thoughts).
    """
    if text.lstrip().startswith("<think>") and "</think>" not in text:
        return ""
    if "```" not in text:
        return text.strip()
    opening = _OPENING.search(text)
    if opening is None:
        inline = _INLINE.search(text)
        return "" if inline is None else inline[2].strip()
    fence = f"`{{{len(opening[1])},}}"
    closing = re.compile(rf"^[ \t]*{fence}[ \t]*$", re.MULTILINE).search(text, opening.end())
    closing = closing or re.compile(fence).search(text, opening.end())
    return "" if closing is None else text[opening.end() : closing.start()].strip()


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters: the head and the tail around a marker."""
    if len(text) <= limit:
        return text
    marker = "\n[... the middle of the output is left out ...]\n"
    room = limit - len(marker)
    return text[:limit] if room < 2 else text[: room - room // 2] + marker + text[len(text) - room // 2 :]


class TerminalAgent:
    """Policy → command → output → policy … until the model stops or something runs out.

    A reply that was cut by ``length`` ends the attempt and is never executed, whether or not it holds a complete block,
    in training and in evaluation alike. What a command prints reaches the model only as the content of a message.
    Ends with ``task_complete``, ``no_command``, ``length`` or ``max_turns``; everything else is the caller's to name.
    """

    class Config(BaseModel):
        """Options of the ``terminal`` agent loop."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        system_prompt: str = Field(
            DEFAULT_SYSTEM_PROMPT, description="what the model is told first; empty: no system message"
        )
        max_turns: int | None = Field(
            None, ge=1, description="model calls of one attempt; default: the run's budget.turns alone"
        )
        command_timeout: float = Field(1200.0, gt=0, lt=inf, description="seconds that one command may take")
        max_output: int = Field(4000, ge=16, description="characters of output that the model sees of one command")
        show_budget: bool = Field(False, description="end every observation with what is left: turns, tokens, seconds")
        show_exit_code: bool = Field(False, description="say the exit code of a command that failed")
        stop_at_max_commands: bool = Field(
            True,
            description="end as task_complete after the commands that the task says it needs "
            "(metadata.rlcore.max_commands), without another model call",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, task: Task, episode: Episode) -> AgentResult:
        """Play one attempt; see :class:`rlcore.protocols.AgentLoop`."""
        config, session, sandbox = self.config, episode.session, episode.sandbox
        if sandbox is None or task.sandbox is None:
            raise ConfigError(f"agent 'terminal': task {task.id} has no sandbox; choose one with sandbox.name")
        await prepare(task, sandbox)
        most_commands = task.data.get("max_commands") if config.stop_at_max_commands else None
        new = [*([Message("system", config.system_prompt)] if config.system_prompt else []), *task.messages]
        asked = commands = 0

        def ended(end: EndReason) -> AgentResult:
            return AgentResult(end, info={"model_calls": asked, "commands": commands})

        while True:
            if asked and (asked == config.max_turns or session.left.turns <= 0):
                return ended(EndReason.MAX_TURNS)
            reply = await session.ask(new)
            asked += 1
            if reply.finish_reason is FinishReason.LENGTH:
                return ended(EndReason.LENGTH)
            command = parse_command(reply.text)
            if not command:
                return ended(EndReason.NO_COMMAND)
            if command[: len(STOP_WORD)].upper() == STOP_WORD:
                return ended(EndReason.TASK_COMPLETE)
            result = await self._execute(command, task, sandbox)
            commands += 1
            if commands == most_commands:
                return ended(EndReason.TASK_COMPLETE)
            new = [Message("user", self._observation(result, session.left))]

    async def _execute(self, command: str, task: Task, sandbox: Sandbox) -> ExecResult:
        assert task.sandbox is not None
        if "\0" in command:
            return ExecResult(exit_code=126, stdout="", stderr="a command cannot hold a NUL character")
        return await sandbox.exec(
            command,
            timeout=self.config.command_timeout,
            cwd=task.sandbox.workdir,
            max_output=4 * self.config.max_output + 256,
        )

    def _observation(self, result: ExecResult, left: BudgetLeft) -> str:
        parts = [part.rstrip("\n") for part in (result.stdout, result.stderr) if part.strip()]
        notes = []
        if result.timed_out:
            notes.append(f"[the command was ended after {self.config.command_timeout:g} s]")
        elif result.exit_code and self.config.show_exit_code:
            notes.append(f"[exit code {result.exit_code}]")
        if self.config.show_budget:
            notes.append(f"[left: {left.turns} turns, {left.tokens} tokens, {left.seconds:.0f} s]")
        tail = "".join(f"\n{note}" for note in notes)
        shown = clip("\n".join(parts) or "(no output)", max(self.config.max_output - len(tail), 16))
        return shown + tail
