"""The recipe ``glm52``: fully asynchronous GRPO of GLM-5.2 on terminal-bench-2, 16 GB300 nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rlcore.types import Cluster, Problem

from glm52_plugin.figures import ENGINES, LAYOUTS, REASONS

if TYPE_CHECKING:
    from rlcore.config import RunConfig
    from rlcore.plan.report import PlanRequest

__all__ = ["Glm52Recipe"]


class Glm52Recipe:
    """The defaults of the run. Figures are in :mod:`glm52_plugin.figures`; what may not be combined, in ``whole``."""

    description = "GLM-5.2 744B-A40B learns terminal-bench-2 by asynchronous GRPO on 16 nodes of 4 GB300"

    class Config(BaseModel):
        """What no section of a run holds: how many nodes, which profile, where things are."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        nodes: int | None = Field(None, ge=1, description="all nodes; default: 16, and fewer for a cut model")
        training_nodes: int | None = Field(
            None, ge=1, description="nodes that train; default: 8, and fewer for a cut model; the others serve"
        )
        gpus_per_node: int = Field(4, ge=1, description="GPUs of a node")
        gpu: str = Field("gb300", description="kind of GPU, for the planner and preflight")
        inference: Literal["balanced", "low-latency"] = Field(
            "balanced", description="balanced: an engine a node; low-latency: one over two nodes"
        )
        layers: Literal[5, 6, 20, 78] = Field(78, description="78: the model; fewer: its first layers, for bring-up")
        model: str = Field("/models/GLM-5.2", description="folder of the bf16 checkpoint")
        served_model: str = Field("/models/GLM-5.2-FP8", description="folder of the FP8 checkpoint that engines load")
        tasks: str = Field("tasks/train", description="folder of task folders to train on")
        heldout: str = Field("tasks/heldout", description="folder of task folders to evaluate on")
        scratch: str = Field("/scratch/rlcore", description="node-local folder of streamed state and caches")
        sandbox_cpu_quota: int | None = Field(
            None, ge=1, description="CPUs that the sandbox provider gives; unset: learned from its refusals"
        )
        replay: str | None = Field(
            None, description="run directory whose recorded attempts are trained again; then no node serves"
        )

        @property
        def all_nodes(self) -> int:
            """Nodes, after defaults."""
            return self.nodes if self.nodes is not None else int(LAYOUTS[self.layers]["nodes"])

        @property
        def train_nodes(self) -> int:
            """Training nodes, after defaults."""
            if self.training_nodes is not None:
                return self.training_nodes
            return self.all_nodes if self.replay else int(LAYOUTS[self.layers]["training_nodes"])

        @property
        def serving_nodes(self) -> int:
            """Nodes that are left for engines; never negative."""
            return max(0, self.all_nodes - self.train_nodes)

    def __init__(self, config: Config) -> None:
        self.config = config

    def configuration(self) -> Mapping[str, Any]:
        """See :class:`rlcore.protocols.Recipe`."""
        own = self.config
        layout = {key: LAYOUTS[own.layers][key] for key in ("tp", "pp", "split", "cp", "ep")}
        least = {"min_cpus": 2.0, "min_memory_mb": 4096, "min_disk_mb": 10240}
        speculative = {} if own.layers == 78 else {"speculative": None}
        return {
            "run": {"steps": 100, "checkpoint_every": 10, "keep_checkpoints": 2},
            "model": {"path": own.model, "dtype": "bfloat16"},
            "taskset": {"name": "tbench2", "path": own.tasks, **least},
            "agent": {"name": "terminal", "command_timeout": 1200.0, "max_output": 4000, "show_budget": True},
            "grader": {"name": "tbench2"},
            "sandbox": {"name": "daytona", "auto_stop_min": 30, "auto_delete_min": 120},
            "policy": {"name": "sglang"},
            "engine": {
                "name": "sglang",
                "model_path": own.served_model,
                **ENGINES[own.inference],
                "deepep": "auto",
                "quantization": "fp8",
                "kv_dtype": "fp8_e4m3",
                "page_size": 64,
                "memory_fraction": 0.85,
                "buffers_gib": 17.05,
                "tool_parser": "glm47",
                "reasoning_parser": "glm45",
                "dp_aware": True,
                "pause": "in_place",
                **speculative,
            },
            "trainer": {
                "name": "megatron",
                **layout,
                "etp": 1,
                "micro_tokens": 8192,
                "logprob_chunk": 16384,
                "recompute": "full",
                "fp32_gradients": True,
                "optimizer_state": "stream",
                "scratch": own.scratch,
                "lr": 1e-6,
                "weight_decay": 0.1,
                "betas": (0.9, 0.98),
                "max_grad_norm": 1.0,
                "train_router_bias": False,
                "aux_loss": 0.0,
                "train_mtp": False,
                "bucket_gib": 2.0,
                "dump_batches": False,
            },
            "advantage": {"name": "grpo"},
            "correction": {"name": "token_tis", "low": 0.0, "high": 2.0},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "entropy_coef": 0.0},
            "aggregation": {"name": "token_mean"},
            "rollout": {
                "tasks_per_step": 8,
                "samples_per_task": 8,
                "in_flight": 128,
                "max_age": 4,
                "temperature": 0.8,
            },
            "budget": {"tokens_per_turn": 8192, "tokens_per_session": 65536, "turns": 30, "seconds": 3600.0},
            "eval": {
                "every": 10,
                "taskset": {"name": "tbench2", "path": own.heldout, **least},
                "samples_per_task": 2,
                "temperature": 0.8,
            },
        }

    def reasons(self) -> Mapping[str, str]:
        """See :class:`rlcore.protocols.ExplainedRecipe`."""
        return REASONS

    def preflight(self, run: RunConfig) -> Iterable[Problem]:
        """See :class:`rlcore.protocols.Recipe`."""
        from glm52_plugin.preflight import problems_of

        return problems_of(self.config, run)

    def prepare(self, run: RunConfig) -> None:
        """Nothing can be made: checkpoints and tasks are the user's."""

    def plan(self, run: RunConfig) -> PlanRequest:
        """See :class:`rlcore.protocols.PlannedRecipe`."""
        from glm52_plugin.planning import plan_of

        return plan_of(self.config, run)

    def cluster(self, run: RunConfig) -> Cluster:
        """See :class:`rlcore.protocols.ClusterRecipe`."""
        from glm52_plugin.cluster import cluster_of

        return cluster_of(self.config, run)
