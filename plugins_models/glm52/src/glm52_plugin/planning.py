"""The run as the planner sees it, and the reference's figures beside the planner's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcore.plan.hardware import gpu_named
from rlcore.plan.report import Compared, Plan, PlanRequest
from rlcore.plan.serving import GIB, Serving, kv_cell, kv_tokens, weight_bytes
from rlcore.plan.steps import Workload
from rlcore.plan.training import Layout, Stage, stages

from glm52_plugin.model import shapes_of

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["layout_of", "plan_of", "serving_of", "stages_of"]

ATTEMPT_SECONDS = 638 * 3600 / 6469
"""Mean wall clock of the reference's attempts: 638 h over 6,469."""


def layout_of(own: Any, run: RunConfig) -> Layout:
    """The training half."""
    options = run.trainer.options
    return Layout(
        gpus=own.train_nodes * own.gpus_per_node,
        tp=options.tp,
        pp=options.pp,
        cp=options.cp,
        ep=options.ep,
        etp=options.etp,
        split=options.split,
        sequence=run.budget.tokens_per_session,
        micro_tokens=options.micro_tokens,
        logprob_chunk=options.logprob_chunk,
        recompute=options.recompute,
    )


def stages_of(own: Any, run: RunConfig) -> list[Stage]:
    """What a rank of each training stage holds."""
    return stages(shapes_of(own.layers), layout_of(own, run))


def serving_of(own: Any, run: RunConfig) -> Serving | None:
    """The inference half; ``None`` if recorded attempts are replayed."""
    if own.replay or not own.serving_nodes:
        return None
    options = run.engine.options
    return Serving(
        engines=max(1, own.serving_nodes * own.gpus_per_node // options.gpus),
        gpus=options.gpus,
        ep=options.ep,
        dp_attention=options.dp_attention,
        weight_bits=8 if options.quantization == "fp8" else 16,
        kv_bits=8 if options.kv_dtype.startswith("fp8") else 16,
        memory_fraction=options.memory_fraction,
        buffers_gib=options.buffers_gib,
        mtp=options.speculative is not None,
    )


def plan_of(own: Any, run: RunConfig) -> PlanRequest:
    """What :mod:`rlcore.plan` derives everything from."""
    shapes = shapes_of(own.layers)
    work = Workload(
        rows=run.rollout.tasks_per_step * run.rollout.samples_per_task,
        row_tokens=run.budget.tokens_per_session // 4,
        sampled_tokens=run.budget.tokens_per_session // 16,
        in_flight=run.rollout.in_flight,
        episode_seconds=ATTEMPT_SECONDS,
        overlap=run.rollout.max_age > 0,
        accepted=1.6 if run.engine.options.speculative else 1.0,
        eval_every=run.eval.every,
        eval_seconds=run.budget.seconds,
        bucket_gib=run.trainer.options.bucket_gib,
    )
    return PlanRequest(
        title=f"{shapes.name} on {own.all_nodes} nodes: {own.train_nodes} train, {own.serving_nodes} serve",
        shapes=shapes,
        gpu=gpu_named(own.gpu),
        gpus_per_node=own.gpus_per_node,
        layout=layout_of(own, run),
        serving=serving_of(own, run),
        work=work,
        compare=_compare if own.layers == 78 and own.gpu == "gb300" else lambda plan: (),
    )


def _compare(plan: Plan) -> Sequence[Compared]:
    """The reference run's figures. Each is derived anew from this plan, so a changed plan shows changed figures."""
    request = plan.request
    shapes, layout, gpu = request.shapes, request.layout, request.gpu
    found = plan.stages
    state = "-".join(f"{stage.optimizer / 1e9:.0f}" for stage in found)
    average = 12 * shapes.total / layout.gpus / 1e9
    rows = [
        Compared("parameters", "744B (753.3B with MTP)", f"{shapes.total:,} ({shapes.total + shapes.mtp:,})", "Exact."),
        Compared(
            "active parameters",
            "40B",
            ", ".join(f"{count / 1e9:.2f}e9 {name}" for name, count in shapes.active_conventions.items()),
            "Publishers count differently; 40 is the one without the embedding.",
        ),
        Compared(
            "optimizer state of a rank, GB (1e9)",
            "279",
            f"{average:.0f} on average; by stage {state}",
            "The published figure is the average of all ranks at DP 1; the first stage holds three dense layers instead "
            "of expert layers, the last one the output head.",
        ),
        Compared(
            "tokens of a row on a rank", "about 16k", f"{layout.tokens_per_rank:,}", f"65,536 over CP {layout.cp}."
        ),
    ]
    flat = stages(shapes, Layout(32, tp=1, pp=4, cp=8, ep=8, split=(18, 20, 20, 20)))
    held = [(stage.weights + stage.gradients) / 1e9 for stage in flat]
    rows.append(
        Compared(
            "TP 1, weights and gradients of a rank, GB (1e9)",
            "said not to fit",
            f"{min(held):.0f} to {max(held):.0f} of {gpu.memory_gib * GIB / 1e9:.0f}",
            "Steady state fits. Most likely the remark is about the peak while a checkpoint loads, which this planner does "
            "not model.",
        )
    )
    if plan.cell is not None and request.serving is not None:
        rows += _compare_engine(plan, request.serving)
    if plan.time is not None:
        time = plan.time
        rows.append(
            Compared(
                "minutes of a step",
                "12.6 (100 steps in 21 h) and about 6.5",
                f"{time.seconds / 60:.1f} without evaluation, {time.seconds_with_evaluation / 60:.1f} with",
                "The two published figures conflict unless one leaves evaluations out: one that waits for an attempt of "
                "3,600 s every 10 steps adds 6.0 min a step, and 6.5 + 6.0 = 12.5. Ours rests on the assumptions above; "
                "row lengths and disk speed of the reference are not published.",
            )
        )
    return rows


def _compare_engine(plan: Plan, serving: Serving) -> Sequence[Compared]:
    from dataclasses import replace

    shapes, gpu = plan.request.shapes, plan.request.gpu
    cell = plan.cell
    assert cell is not None
    scaled = kv_cell(shapes, replace(serving, kv_scales=True))
    lean = 576 * cell.layers + 132 * (len(shapes.indexers) + (1 if serving.mtp else 0))
    less = kv_tokens(gpu.memory_gib, 0.75, weight_bytes(shapes, serving) / GIB + serving.buffers_gib, cell)
    return [
        Compared(
            "KV tokens of a rank at memory fraction 0.85 and 0.75",
            "about 553k and 26k",
            f"{plan.kv_tokens:,} at {serving.memory_fraction}, {less:,} at 0.75",
            f"Both follow from {cell.per_layer} B × {cell.layers} = {cell.per_token:,} B a token; buffers "
            f"({serving.buffers_gib} GiB) are what the two figures leave beside the weights.",
        ),
        Compared(
            "cell of the KV cache, bytes a token and layer",
            "708 by those figures",
            f"{cell.per_layer}; with scales and a bf16 rotary key {scaled.per_layer}",
            f"The recipe's flags would mean {scaled.per_layer} ({scaled.per_token:,} B a token), which does not give "
            f"553k. Indexer keys only where an indexer is would need {lean:,} B a token.",
        ),
    ]
