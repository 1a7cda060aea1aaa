"""The recipe ``glm52-toy``: GLM-5.2's architecture, small and random, through the same loop on a CPU.

It proves that every part of the architecture trains and is served (latent attention, sparse attention with shared
indexers, routed and shared experts, sigmoid router with bias); it learns nothing worth having.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from shutil import copyfile, rmtree
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError
from rlcore.types import Problem

from glm52_plugin.model import TOY

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["Glm52Toy"]

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "rlcore_engine": "rlcore-engine",
    "rlcore_torch": "rlcore-torch",
    "rlcore_local": "rlcore-local",
    "rlcore_quickstart": "rlcore-quickstart",
}
"""Modules that it needs beside this plugin, and what to install."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class Glm52Toy:
    """A random model of GLM-5.2's architecture on bundled shell tasks."""

    description = "GLM-5.2's architecture, random and tiny, through the whole loop on a CPU"

    class Config(BaseModel):
        """Options of the recipe."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        layers: int = Field(8, ge=4, le=78, description="decoder layers; the first three are dense")
        seed: int = Field(0, description="seed of the random weights")
        kinds: tuple[str, ...] = Field(("write", "copy"), min_length=1, description="kinds of bundled tasks")
        tasks_per_kind: int = Field(8, ge=1, description="tasks of each kind")

    def __init__(self, config: Config) -> None:
        self.config = config

    def configuration(self) -> Mapping[str, Any]:
        """See :class:`rlcore.protocols.Recipe`."""
        return {
            "run": {"steps": 2, "checkpoint_every": 0, "max_empty_steps": 100},
            "model": {"path": str(self._folder("model")), "dtype": "float32"},
            "taskset": {"name": "tbench2", "path": str(self._folder("tasks"))},
            "agent": {"name": "terminal", "system_prompt": "", "command_timeout": 2.0, "max_output": 200},
            "grader": {"name": "tbench2"},
            "sandbox": {"name": "local", "memory_mb": 256, "disk_mb": 16},
            "policy": {"name": "embedded"},
            "engine": {"name": "embedded", "side": "transformers"},
            "trainer": {"name": "torch", "lr": 1e-4},
            # a random model solves nothing: rewards are all equal, so equal groups must be trained for a step to happen
            "advantage": {"name": "reinforce", "baseline": 0.5},
            "correction": {"name": "token_tis"},
            "loss": {"name": "ppo_clip"},
            "aggregation": {"name": "token_mean"},
            "rollout": {"tasks_per_step": 2, "samples_per_task": 2, "in_flight": 4},
            "budget": {"tokens_per_turn": 8, "tokens_per_session": 512, "turns": 1, "seconds": 60.0},
        }

    def preflight(self, run: RunConfig) -> Iterable[Problem]:
        """See :class:`rlcore.protocols.Recipe`."""
        for module, install in NEEDED.items():
            if importlib.util.find_spec(module) is None:
                yield Problem("packages", f"the package {module} is not installed", f"pip install {install}")

    def prepare(self, run: RunConfig) -> None:
        """Write the model and the tasks once."""
        from rlcore_tbench2.bundled import write_tasks

        try:
            write_tasks(
                self._folder("tasks"), split="train", kinds=self.config.kinds, per_kind=self.config.tasks_per_kind,
                seed=0, examples=0,
            )  # fmt: skip
            self._write_model(self._folder("model"))
        except OSError as error:
            raise ConfigError(f"cannot write into {_cache()}: {error}; set RLCORE_CACHE to another folder") from error

    def _folder(self, what: str) -> Path:
        key = json.dumps([self.config.model_dump(), dict(TOY)], sort_keys=True)
        return _cache() / "glm52-toy" / f"{what}-{sha256(key.encode()).hexdigest()[:12]}"

    def _write_model(self, folder: Path) -> None:
        if folder.is_dir():
            return
        import torch
        from rlcore_quickstart import tiny_model_path
        from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

        tokenizer = json.loads((tiny_model_path() / "config.json").read_text("utf-8"))
        ids = {key: tokenizer[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        config = GlmMoeDsaConfig(**{**TOY, **ids, "num_hidden_layers": self.config.layers})
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            with torch.random.fork_rng():
                torch.manual_seed(self.config.seed)
                GlmMoeDsaForCausalLM(config).save_pretrained(Path(scratch) / "made")
            for name in TOKENIZER_FILES:
                copyfile(tiny_model_path() / name, Path(scratch) / "made" / name)
            try:
                os.rename(Path(scratch) / "made", folder)
            except OSError:
                if not folder.is_dir():  # another process was faster: its model is the same
                    raise
                rmtree(Path(scratch) / "made", ignore_errors=True)


def _cache() -> Path:
    return Path(os.environ.get("RLCORE_CACHE") or Path.home() / ".cache" / "rlcore").absolute()
