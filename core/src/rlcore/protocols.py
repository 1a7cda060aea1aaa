"""What a plugin implements. Every offered class is built as ``cls(config)`` with an instance of its nested ``Config``.

``Config`` is a pydantic model: the core validates the options of a section (``sandbox.memory_mb = 512``) against it
before anything heavy is imported. So the module of an offered class imports nothing heavy at its top: torch, an SDK or
transformers are imported where they are used. Facts of the run come later, as arguments
(:class:`~rlcore.types.RunContext`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from rlcore.types import (
    AgentResult,
    Array,
    Batch,
    BudgetLeft,
    Cluster,
    Completion,
    ExecResult,
    Group,
    Message,
    MicroBatch,
    ModelRequest,
    Problem,
    Reply,
    RunContext,
    SandboxInfo,
    SandboxSpec,
    Stat,
    Task,
    Trajectory,
    Verdict,
)

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.plan.report import PlanRequest

__all__ = [
    "AdvantageEstimator",
    "AgentLoop",
    "Aggregation",
    "ClusterRecipe",
    "Corrected",
    "Correction",
    "Engine",
    "Episode",
    "ExplainedRecipe",
    "Grader",
    "Launcher",
    "Loss",
    "LossOutput",
    "Objective",
    "PlannedRecipe",
    "PolicyClient",
    "Recipe",
    "Renderer",
    "RoutingClient",
    "Sandbox",
    "SandboxBackend",
    "Session",
    "StepResult",
    "Taskset",
    "Tracker",
    "Trainer",
    "WindowedClient",
]


# --- the policy -------------------------------------------------------------------------------------------------------


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into token ids so that untrusted text never becomes a control token.

    Only the template's own glue is parsed for control tokens; the content of every message is encoded as plain text.
    """

    def render(self, messages: Sequence[Message]) -> list[int]:
        """``[P]`` ids of the whole conversation up to where the assistant begins to speak."""
        ...

    def extend(self, history: Sequence[Message], completion: Completion, new: Sequence[Message]) -> list[int] | None:
        """Ids to append behind ``completion.token_ids`` for the next prompt: the new messages and nothing else.

        ``history`` are the messages before the completion. If the sampled ids do not end with the end-of-turn marker,
        the marker comes first. ``None`` if the template would rewrite the past: the session then starts a new row.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids without the end-of-turn marker; undecodable bytes become U+FFFD."""
        ...


@runtime_checkable
class PolicyClient(Protocol):
    """Asks a model. A generation is not idempotent: a client never sends a request twice.

    Raises (all methods): ``PolicyUnavailable`` for an unusable answer or no answer, ``Throttled`` if the server refused
    before it began. A cancelled or timed-out :meth:`complete` aborts the request at the engine before it returns.
    """

    async def start(self, context: RunContext) -> None:
        """Connect; called once in the event loop of the run."""
        ...

    @property
    def renderer(self) -> Renderer | None:
        """The renderer of a token-exact client; ``None``: it takes messages and gives text (evaluation only)."""
        ...

    async def complete(self, request: ModelRequest) -> Completion:
        """One generation. Token-exact clients return ids with as many finite, non-positive log-probs."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request at the engine by its id; unknown ids are fine."""
        ...

    async def running(self) -> frozenset[str] | None:
        """Ids that the engine is working on, to reconcile with the ledger; ``None`` if it cannot tell."""
        ...

    async def aclose(self) -> None:
        """Abort what is open and close the connections."""
        ...


@runtime_checkable
class RoutingClient(Protocol):
    """What a policy client may have beside: it keeps each session on one of several engines."""

    def release(self, session_id: str) -> None:
        """A session ended: its engine has room for another. Unknown ids are fine."""
        ...


@runtime_checkable
class WindowedClient(Protocol):
    """What a policy client may have beside: it knows how long a sequence its model takes."""

    @property
    def context_length(self) -> int | None:
        """Prompt and sampled tokens of one sequence; a session's budget is never more. ``None``: it does not know."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Serves a model and takes new weights. An update is pause, update, flush, resume: the loop keeps the order."""

    async def start(self, context: RunContext) -> None:
        """Load the model (version 0, or the version of the checkpoint that is resumed) and begin to serve."""
        ...

    async def pause(self) -> None:
        """No request samples a token between this and :meth:`resume`; running ones keep their place."""
        ...

    async def update_weights(self, version: int, weights: Iterable[tuple[str, Array]]) -> None:
        """Load tensors named as in the Hugging Face checkpoint; all or nothing: on an error the old version stays."""
        ...

    async def flush(self) -> None:
        """Forget every cached prefix: it was computed with old weights. Retries while the engine is busy."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights that serve now, as the engine says."""
        ...

    async def aclose(self) -> None:
        """Stop, free the port and end every process that it started."""
        ...


# --- agents -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Session(Protocol):
    """One conversation with the policy, within a budget. The core's own implementation is ``rollout.session``."""

    async def ask(self, new_messages: Sequence[Message]) -> Reply:
        """Add messages, sample one turn, return it.

        The turn's cap is the minimum of the turn limit and what is left of the session. Observations that do not fit
        are refused before anything is sent.

        Raises:
            BudgetExhausted: no token, turn or second is left; nothing was sent. (``rlcore.rollout.session``)
            PolicyUnavailable: no usable answer.
        """
        ...

    @property
    def left(self) -> BudgetLeft:
        """What is left; an agent may tell the model."""
        ...


class Episode(Protocol):
    """What an agent loop works with."""

    @property
    def session(self) -> Session:
        """The conversation with the policy."""
        ...

    @property
    def sandbox(self) -> Sandbox | None:
        """The started sandbox of a task that has one."""
        ...


@runtime_checkable
class AgentLoop(Protocol):
    """Plays one attempt. Instances are shared by all attempts and keep no state of one."""

    async def run(self, task: Task, episode: Episode) -> AgentResult:
        """Talk to ``episode.session`` and act in ``episode.sandbox`` until the attempt ends.

        Runs under the episode's clock and may be cancelled at every await. ``BudgetExhausted`` may be left to the
        caller, which ends the attempt with the right reason. Must not change ``task``.
        """
        ...


@runtime_checkable
class Grader(Protocol):
    """Gives the verdict after the agent's part, in its own window, whatever ended the agent's part."""

    async def grade(self, task: Task, sandbox: Sandbox | None, trajectory: Trajectory) -> Verdict:
        """The verdict. Raises ``VerifierUnavailable`` if there is none: it is never 0 by default."""
        ...


@runtime_checkable
class Taskset(Protocol):
    """Tasks in a fixed order."""

    def load(self) -> Sequence[Task]:
        """All tasks, in an order that depends on the configuration alone; ids are unique.

        Raises ``TaskError`` naming file and key. An empty set is an error of the caller.
        """
        ...


# --- sandboxes --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Sandbox(Protocol):
    """A place where commands run. Files and background processes stay between commands; cwd and environment do not.

    Every method raises ``SandboxLost`` if the sandbox is gone, and only then. After :meth:`close` every other method
    raises ``SandboxLost``; a second :meth:`close` does nothing.
    """

    id: str
    """The provider's id."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        max_output: int = 64 * 1024,
    ) -> ExecResult:
        """Run a command (a string by ``bash -c``/``sh -c``, a list as it is) with stdin closed.

        Returns when the command itself ends, also if it left children in the background. A time-out (finite, > 0; else
        ``ValueError``) kills everything that the command started, and the sandbox lives on: ``timed_out`` is set.
        ``max_output`` bounds stdout and stderr, each, in bytes; more is never held in memory. A failing command is a
        result, not an error.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The content.

        Raises ``FileNotFoundError``, ``IsADirectoryError``, ``PermissionError``, or ``ValueError`` if it is too large.
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write, creating parent folders. Raises ``IsADirectoryError``, ``PermissionError``, ``OSError`` (full)."""
        ...

    async def upload_dir(self, source: Path, target: str) -> None:
        """Copy a folder's content in, modes kept; links that leave ``source`` raise ``ValueError``."""
        ...

    async def download_dir(self, source: str, target: Path) -> None:
        """Copy a folder's content out; nothing is ever written outside ``target``, whatever links are inside."""
        ...

    async def alive(self) -> bool:
        """Whether commands can still run."""
        ...

    async def close(self) -> None:
        """End every process and delete everything; never raises for a sandbox that is already gone."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """Starts sandboxes of one kind. One instance, and one provider client, per process.

    ``Throttled`` means: later; anything else (``ConfigError`` for a spec that can never start, ``InfraError``) is final
    for this attempt. The lease in the core does the retrying and the bookkeeping: a backend does neither.
    """

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Create and wait until commands can run. Cancelled half-way, nothing is left behind."""
        ...

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Every live sandbox that carries all of ``labels``, also those of other processes."""
        ...

    async def delete(self, sandbox_id: str) -> None:
        """Delete by id, for the sweeper; unknown ids are fine."""
        ...

    async def aclose(self) -> None:
        """Close what is open, sandboxes first."""
        ...


# --- the objective ----------------------------------------------------------------------------------------------------


@runtime_checkable
class AdvantageEstimator(Protocol):
    """Turns the rewards of groups into one advantage per trajectory (or per turn of it)."""

    def __call__(self, groups: Sequence[Group]) -> Mapping[str, float | Sequence[float]]:
        """Advantage by trajectory id: a number for all its tokens, or one number per turn.

        A trajectory without a verdict gets no entry and has no influence on the others. A group whose advantages are
        all zero may be left out: nothing is to be learned from it.
        """
        ...


class Corrected(NamedTuple):
    """What a correction decides. All ``[T]``.

    Attributes:
        weights: float32, detached; 1 where nothing is corrected. Only read where ``mask``.
        mask: bool, a subset of the batch's mask: tokens that give a gradient.
        counted: bool, between ``mask`` and the batch's mask: tokens that stay in the denominator.
        metrics: mergeable measurements over the batch's mask.
    """

    weights: Array
    mask: Array
    counted: Array
    metrics: Mapping[str, Stat]


@runtime_checkable
class Correction(Protocol):
    """What is done about the gap between trainer and engine log-probs. Every TIS variant is one."""

    logprobs: Literal["old", "current"]
    """What it compares with ``rollout_logprobs``: ``old_logprobs``, or the trainer's current ones, detached."""

    unit: Literal["token", "row", "group", "batch"]
    """What must lie whole in one call for the result to be right (``batch``: every row of the step). A caller that has
    ``old_logprobs`` of the whole step may call it once over all rows and slice the result."""

    def __call__(self, trainer_logprobs: Array, batch: MicroBatch) -> Corrected:
        """``trainer_logprobs [T]`` float32 without gradient; reads the batch's log-probs, advantages and boundaries."""
        ...


@runtime_checkable
class Aggregation(Protocol):
    """The rule that turns masks and boundaries into per-token weights and the denominator."""

    unit: Literal["token", "row", "group"]
    """What must lie whole in one micro-batch and on one rank for the rule to be right."""

    def __call__(self, counted: Array, batch: MicroBatch) -> tuple[Array, Array]:
        """Weights ``[T]`` float32 and this micro-batch's part of the global denominator (a scalar to be summed)."""
        ...


class LossOutput(NamedTuple):
    """A weighted **sum** over the tokens of a micro-batch (a scalar with gradient) and mergeable measurements."""

    loss: Array
    metrics: Mapping[str, Stat]


@runtime_checkable
class Loss(Protocol):
    """The policy objective: terms per token, times the correction's and the aggregation's weights, summed."""

    needs_old_logprobs: bool
    """Whether ``batch.old_logprobs`` must be there. If false and they are ``None``, the ratio is to the current
    log-probs, detached (one step per batch: the gradient is that of ratio 1), or as the loss documents.

    Two more may be there, false if they are not: ``needs_ref_logprobs`` and ``needs_entropies``, for the fields of the
    micro-batch of that name; a trainer that cannot give them refuses the loss."""

    def __call__(self, logprobs: Array, batch: MicroBatch, corrected: Corrected, token_weights: Array) -> LossOutput:
        """``logprobs [T]`` current, with gradient; ``token_weights [T]`` from the aggregation.

        Masked positions are selected, never multiplied: whatever they hold (NaN too), their gradient is exactly 0.
        """
        ...


class Objective(NamedTuple):
    """The resolved objective that a trainer gets: plain callables, looked up once."""

    correction: Correction
    loss: Loss
    aggregation: Aggregation


# --- training ---------------------------------------------------------------------------------------------------------


class StepResult(NamedTuple):
    """What one optimizer step was.

    Attributes:
        metrics: ``loss``, ``grad_norm``, ``k3``, ``clip_fraction``, ``ess``, …; a missing measurement is missing.
        logprobs: per sample ``[T]`` current log-probs as this step saw them before its update, NaN outside the mask.
        old_logprobs: per sample ``[T]`` log-probs before the first update of this batch, or ``None`` if nobody asked.
    """

    metrics: Mapping[str, float]
    logprobs: Sequence[Sequence[float]]
    old_logprobs: Sequence[Sequence[float]] | None = None


@runtime_checkable
class Trainer(Protocol):
    """Holds the weights and takes optimizer steps. The loop alone calls it, one call at a time."""

    async def start(self, context: RunContext) -> None:
        """Load the model. Heavy work runs beside the event loop (a thread, an actor), never in it."""
        ...

    async def step(self, batch: Batch, objective: Objective) -> StepResult:
        """One optimizer step: log-probs, correction, loss sums, one global denominator, clipping, update.

        A gradient that is not finite is not applied and sets the metric ``nonfinite`` to 1. Where the weights are as they
        were (that, or nothing left to train on), the metric ``skipped`` is 1: no version is published then.
        """
        ...

    def weights(self) -> Iterable[tuple[str, Array]]:
        """The tensors to publish, named as in the Hugging Face checkpoint."""
        ...

    async def save(self, directory: Path) -> None:
        """Write everything that :meth:`load` needs (weights, optimizer, RNG). The caller makes it atomic.

        Raises ``OSError`` if the disk is full or refuses; the run then ends with one clear error.
        """
        ...

    async def load(self, directory: Path) -> None:
        """Continue exactly where :meth:`save` was called."""
        ...

    async def export(self, directory: Path) -> None:
        """Write what ``transformers.AutoModelForCausalLM.from_pretrained`` loads, with equal logits."""
        ...

    async def aclose(self) -> None:
        """Free the memory and end every process that it started."""
        ...


# --- runs -------------------------------------------------------------------------------------------------------------


@runtime_checkable
class Recipe(Protocol):
    """A full run definition for one model and one kind of hardware."""

    description: str
    """One line for ``rlcore plugins show``."""

    def configuration(self) -> Mapping[str, Any]:
        """The defaults of the run, as nested sections; the file and ``--set`` lie over them."""
        ...

    def preflight(self, run: RunConfig) -> Iterable[Problem]:
        """Everything that would make this run fail, without touching a GPU. Bounded in time; never raises."""
        ...

    def prepare(self, run: RunConfig) -> None:
        """Make what the run needs and can be made (unpack a model, write a task set); idempotent, atomic."""
        ...


@runtime_checkable
class ExplainedRecipe(Protocol):
    """What a recipe may have beside: it says why its values are what they are."""

    def reasons(self) -> Mapping[str, str]:
        """Why, by dotted key; keys without a reason may be missing."""
        ...


@runtime_checkable
class PlannedRecipe(Protocol):
    """What a recipe may have beside: it knows what its run needs (``rlcore plan RECIPE``)."""

    def plan(self, run: RunConfig) -> PlanRequest:
        """Model, layout, engines and workload of this run. Needs no folder, credential or environment variable."""
        ...


@runtime_checkable
class ClusterRecipe(Protocol):
    """What a recipe may have beside: its run is more than this process (``rlcore train --dry-run``, launchers)."""

    def cluster(self, run: RunConfig) -> Cluster:
        """Everything that would run, node by node. Needs no folder, credential or environment variable."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """Starts a run somewhere: here, on Slurm, on Ray. A run of one process is a cluster of one node with a driver."""

    def render(self, run: RunConfig, cluster: Cluster) -> str:
        """What would be run, as text to read or submit."""
        ...

    def launch(self, run: RunConfig, cluster: Cluster) -> int:
        """Run it and return the exit status."""
        ...


@runtime_checkable
class Tracker(Protocol):
    """Sends metrics somewhere. A tracker that fails or hangs is switched off with one warning; the run goes on."""

    def start(self, context: RunContext, config: Mapping[str, Any]) -> None:
        """``config`` is the resolved configuration without secrets."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step; missing measurements are missing, not 0."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended."""
        ...
