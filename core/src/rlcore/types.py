"""The words of rlcore as plain data: what goes from the task set to the optimizer.

Axis letters: G siblings of a group, N rows, T tokens, P prompt tokens. Three families of log-probs exist and are never
confused: ``rollout_logprobs`` (engine, at sampling), ``old_logprobs`` (trainer, before the step; "proximal") and
``logprobs`` (trainer, now, with gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rlcore.protocols import Engine

__all__ = [
    "AgentResult",
    "Array",
    "Batch",
    "Budget",
    "BudgetLeft",
    "Cluster",
    "Completion",
    "EndReason",
    "ExecResult",
    "FinishReason",
    "Group",
    "Max",
    "Mean",
    "Message",
    "MicroBatch",
    "Min",
    "ModelRequest",
    "NodePlan",
    "Problem",
    "Reply",
    "RunContext",
    "Sample",
    "Sampling",
    "SandboxInfo",
    "SandboxSpec",
    "Stat",
    "Task",
    "Trajectory",
    "Turn",
    "Verdict",
]

Array: TypeAlias = Any
"""A numpy array or a torch tensor: the core imports neither."""


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: the text; ``""`` where the wire says ``null``.
        extra: every other key of the message as it came (``tool_calls``, ``reasoning_content``, …), echoed verbatim.
    """

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Message:
        """Build from an OpenAI-style mapping; ``content: null`` becomes ``""``."""
        extra = {key: value for key, value in raw.items() if key not in ("role", "content")}
        return cls(role=str(raw["role"]), content=raw.get("content") or "", extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The OpenAI-style mapping of this message."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox must be. ``None`` means: the backend's default.

    Attributes:
        image: image reference for backends that have images.
        build_context: folder with a ``Dockerfile``; used where ``image`` is ``None``.
        cpus: CPU cores.
        memory_mb: memory in MiB.
        disk_mb: disk in MiB.
        workdir: absolute working directory of commands.
        user: user that commands run as (name or numeric id).
        env: environment of every command.
        network: whether commands may reach the network.
        labels: found again by these on the provider's side; the lease adds run, task and launcher.
        lifetime_s: seconds after which the provider may end the sandbox by itself.
    """

    image: str | None = None
    build_context: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    workdir: str | None = None
    user: str | int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    network: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    lifetime_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """An immutable problem: running it any number of times leaves it as it was.

    Attributes:
        id: unique in its task set.
        messages: the conversation so far (examples, instruction); agent loops may put their own in front.
        sandbox: the sandbox it needs, or ``None`` for a task without one.
        data: what the agent loop and the grader of this kind of task need (a folder, an answer); opaque to the core.
        metadata: free form: kind, difficulty, category; for reports.
        agent_seconds: the task's own clock for the agent, or ``None``: the run's budget alone.
        verifier_seconds: the verifier's own window.
    """

    id: str
    messages: tuple[Message, ...] = ()
    sandbox: SandboxSpec | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent_seconds: float | None = None
    verifier_seconds: float = 600.0


# --- the model --------------------------------------------------------------------------------------------------------


class FinishReason(StrEnum):
    """Why a model call ended. Truncation is read from here, never from the last token."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Log-probs are of the distribution that was sampled from (after temperature and truncation)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call, sent exactly once.

    Attributes:
        id: the request's id at the engine (``rid``); an abort names it.
        session_id: the same for every turn of one attempt: routing key of prefix caches.
        prompt_ids: ``[P]`` token ids, for token-exact clients; ``None`` for clients that take messages.
        messages: the conversation, for clients that take messages.
        max_tokens: at least 1.
        sampling: how to sample.
        seconds: time that is left for this call; the client stops and aborts at the engine when it is over.
    """

    id: str
    session_id: str
    max_tokens: int
    sampling: Sampling
    seconds: float
    prompt_ids: Sequence[int] | None = None
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What one model call returned.

    Attributes:
        token_ids: ``[T]`` sampled ids, the end-of-turn id included where it was sampled; empty for message clients.
        logprobs: ``[T]`` ``rollout_logprobs`` in nats, float32 or better; same length as ``token_ids``.
        finish_reason: why it ended.
        policy_version: version of the weights that sampled the last token, as the engine says.
        min_policy_version: version that sampled the first token, if a weight update fell in between; else the same.
        text: decoded text without the end-of-turn marker, for the agent to read; never encoded again.
        message: the assistant's message, for message clients to echo verbatim.
        prompt_tokens: prompt length as the engine counted it.
        completion_tokens: number of sampled tokens, also where ids are not known.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    min_policy_version: int | None = None
    text: str = ""
    message: Message | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What an agent loop sees of a model call: its text and why it ended (``length``: cut, not to be executed)."""

    text: str
    finish_reason: FinishReason
    message: Message


# --- attempts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """What one attempt may use. All bounds are hard: nothing is generated past them.

    Attributes:
        tokens_per_turn: sampled tokens in one turn.
        tokens_per_session: prompt and sampled tokens of the whole conversation (the context window of a session).
        turns: model calls.
        seconds: wall clock of the agent's part of the episode.
    """

    tokens_per_turn: int
    tokens_per_session: int
    turns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BudgetLeft:
    """What is left of a :class:`Budget`; an agent loop reads it as ``episode.session.left``."""

    tokens: int
    turns: int
    seconds: float


class EndReason(StrEnum):
    """Why an attempt ended. The first six are the policy's doing; an agent loop may return any other string too."""

    TASK_COMPLETE = "task_complete"
    NO_COMMAND = "no_command"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    BUDGET = "budget"
    TIMEOUT = "timeout"
    SANDBOX_LOST = "sandbox_lost"
    POLICY_LOST = "policy_lost"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call in its place.

    Attributes:
        prompt_ids: ``[P]`` the whole prompt that the completion was sampled after. If it begins with the previous
            turn's prompt and completion, both turns lie in one training row; if not, a new row begins here.
        completion: what was sampled.
        observation: the messages with which the world answered (empty for the last turn).
        generation_seconds: wall clock of the model call.
        tool_seconds: wall clock until the observation was there.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion
    observation: tuple[Message, ...] = ()
    generation_seconds: float = 0.0
    tool_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent loop returns: why it ended and, for loops that judge themselves, the reward."""

    end: str
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a grader returns. ``reward`` is finite; no verdict is an exception (``VerifierUnavailable``)."""

    reward: float
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """One attempt at a task.

    Attributes:
        id: unique in the run.
        task_id: the task.
        group_id: the group that it belongs to.
        turns: in order.
        end: an :class:`EndReason` or the agent loop's own word.
        reward: the verdict, or ``None``: there is none, and that is not zero.
        error: what went wrong where ``reward`` is ``None``.
        seconds: wall clock by part: ``reset``, ``agent``, ``verify``, ``close``.
        info: what the agent loop and the grader want to be kept (small, JSON).
    """

    id: str
    task_id: str
    group_id: str
    turns: list[Turn] = field(default_factory=list)
    end: str = ""
    reward: float | None = None
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(turn.completion.completion_tokens or len(turn.completion.token_ids) for turn in self.turns)

    @property
    def min_policy_version(self) -> int | None:
        """The oldest policy version in it; ``None`` without turns."""
        versions = [
            turn.completion.policy_version
            if turn.completion.min_policy_version is None
            else turn.completion.min_policy_version
            for turn in self.turns
        ]
        return min(versions, default=None)


@dataclass(slots=True)
class Group:
    """The G attempts at one task that are compared with each other."""

    id: str
    task: Task
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def rewards(self) -> list[float | None]:
        """``[G]``; ``None`` where there is no verdict."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def min_policy_version(self) -> int | None:
        """The oldest policy version in the group: what its age is counted from."""
        versions = [t.min_policy_version for t in self.trajectories]
        return min((v for v in versions if v is not None), default=None)


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """One trainable row. One trajectory can give several; all lists are ``[T]``.

    Attributes:
        token_ids: prompt, sampled and observed tokens in order.
        mask: true where the token was sampled after exactly the tokens before it in this row.
        rollout_logprobs: engine log-probs in nats where ``mask``, else NaN: reading one by mistake shows.
        advantages: the advantage of each token where ``mask``, else 0.
        turn_ids: index of the turn that sampled the token; −1 elsewhere.
        versions: policy version that sampled the token; −1 elsewhere.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    row: int
    token_ids: list[int]
    mask: list[bool]
    rollout_logprobs: list[float]
    advantages: list[float]
    turn_ids: list[int]
    versions: list[int]
    reward: float

    @property
    def min_policy_version(self) -> int:
        """The oldest version that sampled a token of this row."""
        return min(v for v, m in zip(self.versions, self.mask, strict=True) if m)

    @property
    def max_policy_version(self) -> int:
        """The newest version that sampled a token of this row."""
        return max(v for v, m in zip(self.versions, self.mask, strict=True) if m)


@dataclass(slots=True)
class MicroBatch:
    """Rows packed one behind the other for one forward: numpy arrays from the packer, tensors in a trainer.

    Position t of a row holds everything about predicting ``token_ids[t]`` from the tokens before it in that row; the
    first token of a row is never in the mask.

    Attributes:
        token_ids: ``[T]`` int64.
        mask: ``[T]`` bool: tokens to train.
        rollout_logprobs: ``[T]`` float32, valid where ``mask``, anything (NaN too) elsewhere.
        advantages: ``[T]`` float32.
        turn_ids: ``[T]`` int32, −1 outside ``mask``.
        versions: ``[T]`` int32 policy version of each sampled token, −1 outside ``mask``.
        cu_seqlens: ``[N+1]`` int32: row n is ``[cu_seqlens[n], cu_seqlens[n+1])``.
        row_groups: ``[N]`` int32: number of the row's group in the batch.
        row_trajectories: ``[N]`` int32: number of the row's trajectory in the batch.
        policy_version: version of the weights that are about to be trained; a gap is this minus ``versions``.
        old_logprobs: ``[T]`` float32 trainer log-probs before the step, or ``None`` if nobody asked for them.
        ref_logprobs: ``[T]`` float32 log-probs of a frozen reference policy, or ``None`` if there is none.
        entropies: ``[T]`` float32 entropies of the current distributions, with gradient, or ``None``: only for a loss
            with ``needs_entropies``.
    """

    token_ids: Array
    mask: Array
    rollout_logprobs: Array
    advantages: Array
    turn_ids: Array
    versions: Array
    cu_seqlens: Array
    row_groups: Array
    row_trajectories: Array
    policy_version: int = 0
    old_logprobs: Array | None = None
    ref_logprobs: Array | None = None
    entropies: Array | None = None

    def map(self, convert: Callable[[Array], Array]) -> MicroBatch:
        """A copy with ``convert`` applied to every array that is there (``torch.from_numpy``, ``.to(device)``)."""
        converted = {
            f.name: convert(value)
            for f in fields(self)
            if f.name != "policy_version" and (value := getattr(self, f.name)) is not None
        }
        return replace(self, **converted)


@dataclass(slots=True)
class Batch:
    """Everything of one optimizer step.

    Attributes:
        samples: the rows, in packing order.
        policy_version: version of the weights that are about to be trained.
        temperature: what the rows were sampled with; the trainer's log-probs are of the same distribution.
    """

    samples: list[Sample]
    policy_version: int
    temperature: float = 1.0

    @property
    def tokens(self) -> int:
        """The global number of trainable tokens."""
        return sum(sum(sample.mask) for sample in self.samples)


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Mean:
    """A mean that merges exactly: over micro-batches, ranks and steps."""

    total: Any
    count: Any

    def merge(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        """The mean, or ``None`` of nothing: a missing measurement is not 0."""
        count = float(self.count)
        return float(self.total) / count if count else None


@dataclass(slots=True)
class Max:
    """A maximum that merges; ``None`` is the maximum of nothing."""

    of: Any

    def merge(self, other: Max) -> Max:
        """The larger one."""
        if self.of is None or other.of is None:
            return Max(other.of if self.of is None else self.of)
        return Max(max(float(self.of), float(other.of)))

    def value(self) -> float | None:
        """The maximum or ``None``."""
        return None if self.of is None else float(self.of)


@dataclass(slots=True)
class Min:
    """A minimum that merges; ``None`` is the minimum of nothing."""

    of: Any

    def merge(self, other: Min) -> Min:
        """The smaller one."""
        if self.of is None or other.of is None:
            return Min(other.of if self.of is None else self.of)
        return Min(min(float(self.of), float(other.of)))

    def value(self) -> float | None:
        """The minimum or ``None``."""
        return None if self.of is None else float(self.of)


Stat: TypeAlias = Mean | Max | Min
"""A measurement that merges over micro-batches and ranks by its meaning."""


# --- sandboxes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did.

    Attributes:
        exit_code: as the shell says it; death by signal n is ``128 + n``; −1 if ``timed_out``.
        stdout: decoded with replacement, bounded: head and tail are kept around a marker that counts what is missing.
        stderr: the same, bounded on its own; empty where a backend cannot separate it (then it is in ``stdout``).
        truncated: something of stdout or stderr was cut.
        timed_out: our time-out ended it; a command that exits with 124 by itself has this false.
        seconds: wall clock.
        oom: the memory limit killed it, where the backend can tell.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    oom: bool = False


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the provider lists it: its id, its labels and when it was created (seconds since the epoch)."""

    id: str
    labels: Mapping[str, str]
    created: float | None = None


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunContext:
    """The facts of a run that an offered object gets when it starts; never a secret.

    Attributes:
        run_id: the run.
        run_dir: its directory.
        seed: the run's seed.
        model: the ``model`` section of the configuration: ``path``, ``dtype`` and the rest.
        engine: the engine of the run, for policy clients and trainers; ``None`` while the engine itself starts.
    """

    run_id: str
    run_dir: Path
    seed: int
    model: Mapping[str, Any]
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that a preflight found: which check, what is wrong, what to do; ``fatal`` stops the launch."""

    check: str
    message: str
    remedy: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What runs on some nodes of a cluster.

    Attributes:
        nodes: their numbers, from 0; equal nodes share one description.
        role: what they are for, in a word or two.
        env: environment variables; a secret's value is a reference (``${NAME}``), never the secret.
        commands: command lines in the order in which they start, each as its words.
    """

    nodes: tuple[int, ...]
    role: str
    env: Mapping[str, str]
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A run that is more than one process: what a recipe describes and a launcher starts.

    Attributes:
        nodes: number of nodes; gpus_per_node: GPUs of each.
        plans: what runs where; every node is in one of them.
        settings: what the processes are configured with, by component (``"trainer: parallelism"``): field to value.
        image: container image; empty: none. mounts: ``source:target`` of it.
        fabric_prefix: what an address on the fabric between nodes begins with; empty: not known yet.
        ports: ports of the head that must be free, by what listens there.
        driver: the command that is the run; it runs on the head, and its exit status is the run's.
        pinned: variables that every process needs and that hold a path or a name, never a secret.
    """

    nodes: int
    gpus_per_node: int
    plans: tuple[NodePlan, ...]
    settings: Mapping[str, Mapping[str, Any]]
    driver: tuple[str, ...]
    image: str = ""
    mounts: tuple[str, ...] = ()
    fabric_prefix: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
