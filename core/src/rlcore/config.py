"""The run's configuration: typed sections, layered (recipe < file < ``--set``), every error names the key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["RunConfig"]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Offered(BaseModel):
    """A section that names an offered class; every other key is an option of that class's ``Config``.

    After :func:`resolve`, ``options`` holds the validated instance of that ``Config``.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str


class RunSection(Section):
    """What the run is and how long it goes on."""

    dir: str = Field("runs", description="folder of run directories")
    id: str | None = Field(None, description="name of the run's directory; default: recipe, date and time")
    seed: int = Field(0, description="seed of task order, sampling and the trainer")
    steps: int = Field(100, ge=0, description="optimizer steps")
    checkpoint_every: int = Field(10, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="complete checkpoints that are kept")
    max_empty_steps: int = Field(10, ge=1, description="the run fails after so many steps in a row with nothing to train")
    stop_at_reward: float | None = Field(None, description="end early when the mean reward of five steps reaches this")


class ModelSection(Section):
    """The model that is trained."""

    path: str | None = Field(None, description="folder of a causal model in Hugging Face format")
    dtype: str = Field("auto", description="auto, float32 or bfloat16: what the forward computes in")


class RolloutSection(Section):
    """How attempts are made. One step trains ``tasks_per_step`` groups of ``samples_per_task`` attempts."""

    tasks_per_step: int = Field(8, ge=1)
    samples_per_task: int = Field(8, ge=1)
    in_flight: int = Field(64, ge=1, description="attempts at the same time")
    max_age: int = Field(0, ge=0, description="largest difference of policy versions that is trained; 0: synchronous")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    attempt_retries: int = Field(1, ge=0, description="times that an attempt which the infrastructure ended is made again")
    min_group: int = Field(2, ge=1, description="attempts with a verdict that a group needs to be trained")


class BudgetSection(Section):
    """What one attempt may use; all bounds are hard."""

    tokens_per_turn: int = Field(8192, ge=1)
    tokens_per_session: int = Field(65536, ge=1)
    turns: int = Field(30, ge=1)
    seconds: float = Field(3600.0, gt=0)


class EvalSection(Section):
    """Evaluation on held-out tasks."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0: off")
    before_and_after: bool = Field(False, description="evaluate before the first and after the last step")
    taskset: Offered | None = None
    samples_per_task: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)


class RunConfig(Section):
    """A whole run. Sections with a ``name`` take the options of what they name."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    taskset: Offered
    agent: Offered
    grader: Offered | None = None
    sandbox: Offered | None = None
    policy: Offered
    engine: Offered
    trainer: Offered
    advantage: Offered
    correction: Offered
    loss: Offered
    aggregation: Offered
    rollout: RolloutSection = RolloutSection()
    budget: BudgetSection = BudgetSection()
    eval: EvalSection = EvalSection()
    trackers: tuple[Offered, ...] = ()
    launcher: Offered | None = None
    recipe: dict[str, Any] = Field(default_factory=dict, description="options of the recipe itself")
