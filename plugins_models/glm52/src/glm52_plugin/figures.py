"""Every figure of the recipe with its reason: what it is derived from, or what it was seen to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ENGINES", "LAYOUTS", "REASONS", "Layouts"]

Layouts = Mapping[int, Mapping[str, Any]]

LAYOUTS: Layouts = {
    78: {"nodes": 16, "training_nodes": 8, "tp": 2, "pp": 4, "split": (18, 20, 20, 20), "cp": 4, "ep": 8},
    20: {"nodes": 6, "training_nodes": 4, "tp": 2, "pp": 2, "split": (10, 10), "cp": 4, "ep": 8},
    6: {"nodes": 2, "training_nodes": 1, "tp": 2, "pp": 1, "split": (6,), "cp": 2, "ep": 4},
    5: {"nodes": 2, "training_nodes": 1, "tp": 2, "pp": 1, "split": (5,), "cp": 2, "ep": 4},
}
"""Nodes and training layout by depth. 5 and 6 layers have no second start (layer 3 is dense, layer 7 is the next)."""

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "balanced": {"gpus": 4, "ep": 4, "dp_attention": 4, "max_running": 256, "speculative": (1, 1, 2)},
    "low-latency": {"gpus": 8, "ep": 8, "dp_attention": 1, "max_running": 512, "speculative": (5, 1, 6)},
}
"""Inference by profile: an engine a node with data-parallel attention, or one over two nodes with TP 8."""

REASONS: Mapping[str, str] = {
    "run.steps": "the reference's length: 100 steps in 21 h",
    "run.checkpoint_every": "with every evaluation, so that a checkpoint has a score",
    "run.keep_checkpoints": "one checkpoint is about 10.4 TB (1e12 bytes) with optimizer state",
    "model.path": "the published bf16 checkpoint, 1.5 TB (1e12 bytes)",
    "model.dtype": "as published",
    "taskset.name": "terminal-bench-2 folders",
    "taskset.path": "training part of `rlcore tasks split`",
    "taskset.min_cpus": "the reference's sandbox: 2 vCPU, 4 GiB, 10 GiB",
    "taskset.min_memory_mb": "the reference's sandbox: 2 vCPU, 4 GiB, 10 GiB",
    "taskset.min_disk_mb": "the reference's sandbox: 2 vCPU, 4 GiB, 10 GiB",
    "agent.name": "one command per turn, ended by TASK_COMPLETE",
    "agent.command_timeout": "a third of the attempt's clock, as the reference",
    "agent.max_output": "30 turns of 4,000 characters are about 30k of a session's 65,536 tokens",
    "agent.show_budget": "an agent that sees what is left stops polling before it is cut off",
    "grader.name": "the task's own tests, in their own window",
    "sandbox.name": "remote, so that 128 attempts load no training node",
    "sandbox.auto_stop_min": "minutes without a call; more than the longest command, 20",
    "sandbox.auto_delete_min": "twice the attempt's clock: what a dead run leaves costs two hours at most",
    "policy.name": "token-exact, with abort by request id",
    "engine.name": "serves GLM's sparse attention with FP8 weights",
    "engine.model_path": "bf16 weights are 346 GiB a rank at EP 4 and do not fit 274.5 GiB",
    "engine.gpus": "one node; its NVLink carries the experts' all-to-all",
    "engine.ep": "every GPU of an engine holds its part of the experts",
    "engine.dp_attention": "one latent cache per rank: tensor parallelism would copy it to every rank",
    "engine.deepep": "low-latency kernels in decoding, normal ones in prefill",
    "engine.quantization": "187 GiB of weights a rank in 8 bits",
    "engine.kv_dtype": "708 bytes a token and layer; bf16 would hold half the tokens",
    "engine.page_size": "as the reference",
    "engine.memory_fraction": "0.85 leaves 553k tokens a rank; 0.75 left 26k and cut 84 % of the samples",
    "engine.buffers_gib": "what the two published cache sizes leave beside 187.4 GiB of weights",
    "engine.max_running": "far above the 16 attempts that 128 in flight give each of 8 engines: a queue would be hidden staleness",
    "engine.speculative": "drafts of the model's own prediction layer; short ones keep a full batch efficient",
    "engine.tool_parser": "GLM-5.2's format of tool calls",
    "engine.reasoning_parser": "GLM-5.2's format of thoughts",
    "engine.dp_aware": "prefix-cache hits of 0.96 need every turn on the rank that holds the prefix",
    "engine.pause": "nothing is computed twice: running requests wait where they are",
    "trainer.name": "expert, pipeline and context parallel training",
    "trainer.tp": "halves activations and logits, and what a rank holds while a checkpoint loads; TP 1 would fit otherwise",
    "trainer.pp": "weights and gradients of 744e9 parameters: 177 GB (1e9 bytes) a rank at most",
    "trainer.split": "stages start at layers 1, 19, 39 and 59, which have an indexer of their own",
    "trainer.cp": "65,536 tokens of a row become 16,384 a rank",
    "trainer.ep": "the 8 ranks of a stage hold 32 of 256 experts each",
    "trainer.etp": "an expert of 37.7e6 parameters is too small to cut",
    "trainer.micro_tokens": "32,768 tokens over the 4 context-parallel ranks",
    "trainer.logprob_chunk": "5.1 GB (1e9 bytes) of float32 logits at a time instead of all",
    "trainer.recompute": "activations inside the layers would be tens of times larger",
    "trainer.fp32_gradients": "sums over 64 long rows lose small terms in bf16",
    "trainer.optimizer_state": "DP 1 leaves 298 GB (1e9 bytes) of Adam state on the fullest rank, 279 on average",
    "trainer.scratch": "298 GB × 4 ranks on a node's own NVMe",
    "trainer.lr": "constant, as the reference",
    "trainer.weight_decay": "as the reference",
    "trainer.betas": "0.98 looks back over 50 steps; 0.999 would look over 1,000 in a run of 100",
    "trainer.max_grad_norm": "the usual bound",
    "trainer.train_router_bias": "rate 0: the engine's routing must stay the trainer's",
    "trainer.aux_loss": "0: balance is the pre-trained one",
    "trainer.train_mtp": "drafts only cost speed when they are off; not trained, not published",
    "trainer.bucket_gib": "693 broadcasts of 1,487 GB (1e9 bytes)",
    "trainer.dump_batches": "off: every row is in the run directory already",
    "advantage.name": "rewards of 0 and 1 within a group",
    "correction.name": "truncated importance sampling per token",
    "correction.low": "0: a floor of 0.5 gave collapsed ratios exp(-30) a full gradient and ended two runs",
    "correction.high": "the reference's ceiling",
    "loss.name": "clipped policy gradient",
    "loss.clip_low": "1 − 0.2",
    "loss.clip_high": "1 + 0.28: unlikely tokens may rise further",
    "loss.kl_coef": "0: no reference model is held",
    "loss.entropy_coef": "0",
    "aggregation.name": "every sampled token weighs the same",
    "rollout.tasks_per_step": "8 × 8 = 64 attempts a step",
    "rollout.samples_per_task": "8: a group of all 0 or all 1 teaches nothing",
    "rollout.in_flight": "two batches: one is trained while the next is made",
    "rollout.max_age": "128 in flight are two steps of 64; twice that for slow attempts, and nothing older is trained",
    "rollout.temperature": "as the reference",
    "budget.tokens_per_turn": "16,384 let looping attempts grow to 16k near-deterministic tokens; one command needs less",
    "budget.tokens_per_session": "a whole row of training",
    "budget.turns": "as the reference's agent",
    "budget.seconds": "as the reference's agent",
    "eval.every": "every 10 steps; 0 is off",
    "eval.taskset.name": "terminal-bench-2 folders",
    "eval.taskset.path": "held-out part of `rlcore tasks split`",
    "eval.taskset.min_cpus": "as in training",
    "eval.taskset.min_memory_mb": "as in training",
    "eval.taskset.min_disk_mb": "as in training",
    "eval.samples_per_task": "20 tasks × 2 have a standard error of about 0.08",
    "eval.temperature": "as in training",
}
"""Why each value of the recipe is what it is, by its key."""
