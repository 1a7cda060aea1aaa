"""The sections of a run's configuration, and references to secrets. :mod:`rlcore.resolve` fills them from layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlcore.errors import ConfigError

__all__ = ["EvaluationConfig", "Offered", "RunConfig", "Secret", "Section"]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, ser_json_inf_nan="constants")


class Offered(BaseModel):
    """A section that names an offered class; every other key is an option of that class's ``Config``."""

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="constants")

    name: str

    _options: Any = PrivateAttr(None)

    @property
    def options(self) -> Any:
        """The validated instance of the class's ``Config``; there after :func:`rlcore.resolve.resolve`."""
        if self._options is None:
            raise ConfigError(f"the options of {self.name!r} were not resolved")
        return self._options


class Secret(BaseModel):
    """Where a secret is, never the secret: ``{env = "NAME"}`` or ``{file = "path"}``. For options of plugins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(None, description="name of the environment variable that holds it")
    file: str | None = Field(None, description="path of the file that holds it")

    @model_validator(mode="before")
    @classmethod
    def _no_literals(cls, value: Any) -> Any:
        if not isinstance(value, (dict, cls)):
            raise PydanticCustomError(
                "secret_literal", 'a secret is not written down: name where it is, {env = "NAME"} or {file = "path"}'
            )
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Secret:
        if (self.env is None) == (self.file is None):
            raise ValueError("name one place of the secret, env or file")
        return self

    def read(self) -> str:
        """The secret, read at use; keep it in no attribute, message or file.

        Raises:
            ConfigError: it is not there; says where it was looked for.
        """
        if self.env is not None:
            value = os.environ.get(self.env, "")
            where = f"environment variable {self.env}"
        else:
            where = f"file {self.file}"
            try:
                value = Path(self.file or "").expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"no secret in {where}: {type(error).__name__}") from error
        if not value.strip():
            raise ConfigError(f"no secret in {where}: it is not set or empty")
        return value.strip()


class RunSection(Section):
    """What the run is and how long it goes on."""

    dir: str = Field("runs", description="folder of run directories")
    id: str | None = Field(None, description="name of the run's directory; default: recipe, date and time")
    seed: int = Field(0, description="seed of task order, sampling and the trainer")
    steps: int = Field(100, ge=0, description="optimizer steps")
    checkpoint_every: int = Field(10, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1, description="complete checkpoints that are kept")
    max_empty_steps: int = Field(
        10, ge=1, description="the run fails after so many steps in a row with nothing to train"
    )
    stop_at_reward: float | None = Field(None, description="end early when the mean reward of five steps reaches this")


class ModelSection(Section):
    """The model that is trained."""

    path: str | None = Field(None, description="folder of a causal model in Hugging Face format")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="what the forward computes in")


class RolloutSection(Section):
    """How attempts are made. One step trains ``tasks_per_step`` groups of ``samples_per_task`` attempts.

    ``top_p`` below 1 is refused: engines sample from what it leaves, and a trainer knows of a batch the temperature alone
    (:class:`rlcore.types.Batch`), so its log-probs would be of another distribution than the tokens.
    """

    tasks_per_step: int = Field(8, ge=1)
    samples_per_task: int = Field(8, ge=1)
    in_flight: int = Field(64, ge=1, description="attempts at the same time")
    max_age: int = Field(0, ge=0, description="largest difference of policy versions that is trained; 0: synchronous")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    attempt_retries: int = Field(
        1, ge=0, description="times that an attempt which the infrastructure ended is made again"
    )
    min_group: int = Field(2, ge=1, description="attempts with a verdict that a group needs to be trained")
    sandbox_creates: int = Field(8, ge=1, description="sandboxes that are created at the same time")
    sandbox_pool: int = Field(0, ge=0, description="sandboxes of each kind that are started ahead of need")

    @field_validator("top_p")
    @classmethod
    def _samples_what_is_trained(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                f"{value:g} would sample from the most likely tokens alone, while the trainer's log-probs are of all of them: "
                "leave it at 1 and sharpen with rollout.temperature; attempts.top_p of `rlcore eval` may be lower"
            )
        return value

    @model_validator(mode="after")
    def _groups_can_be_full(self) -> RolloutSection:
        if self.min_group > self.samples_per_task:
            raise ValueError(
                f"min_group={self.min_group} is above samples_per_task={self.samples_per_task}: no group would be trained"
            )
        return self


class BudgetSection(Section):
    """What one attempt may use; all bounds are hard."""

    tokens_per_turn: int = Field(8192, ge=1)
    tokens_per_session: int = Field(65536, ge=1)
    turns: int = Field(30, ge=1)
    seconds: float = Field(3600.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _turns_fit(self) -> BudgetSection:
        if self.tokens_per_turn > self.tokens_per_session:
            raise ValueError(
                f"tokens_per_turn={self.tokens_per_turn} is above tokens_per_session={self.tokens_per_session}"
            )
        return self


class UnseenSection(Section):
    """A second task set to evaluate on: kinds of tasks that are never trained."""

    taskset: Offered


class EvalSection(Section):
    """Evaluation on held-out tasks."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0: off")
    before_and_after: bool = Field(False, description="evaluate before the first and after the last step")
    taskset: Offered | None = None
    samples_per_task: int = Field(1, ge=1)
    greedy: bool = Field(False, description="evaluate greedy decoding too, before and after")
    unseen: UnseenSection | None = Field(None, description="evaluate on this task set too, before and after")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_tasks(self) -> EvalSection:
        if (self.every or self.before_and_after) and self.taskset is None:
            raise ValueError("an evaluation needs held-out tasks: set eval.taskset.name")
        return self


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
    recipe: Offered | None = Field(None, description="the recipe that gave the defaults, and its own options")


class AttemptsSection(Section):
    """The attempts of an evaluation."""

    samples_per_task: int = Field(1, ge=1)
    in_flight: int = Field(8, ge=1, description="attempts at the same time")
    retries: int = Field(2, ge=0, description="times that an attempt which the infrastructure ended is made again")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, description="seed of sampling, for servers that take one")


class EvaluationConfig(Section):
    """An evaluation outside a run (``rlcore eval``)."""

    taskset: Offered
    agent: Offered
    grader: Offered | None = None
    sandbox: Offered | None = None
    policy: Offered
    engine: Offered | None = None
    model: ModelSection = ModelSection()
    budget: BudgetSection = BudgetSection()
    attempts: AttemptsSection = AttemptsSection()
