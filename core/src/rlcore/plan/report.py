"""A whole plan: everything that is derived for a model, a layout, an engine and a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlcore.plan.hardware import Gpu
from rlcore.plan.serving import GIB, KvCell, Serving, kv_cell, kv_tokens_per_rank, serving_problems, weight_bytes
from rlcore.plan.shapes import Shapes
from rlcore.plan.steps import StepTime, Workload, assumptions, fits, step_time
from rlcore.plan.training import Layout, Stage, problems, stages

__all__ = ["Compared", "Plan", "PlanRequest", "make_plan"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A published figure beside the one that is derived here, and why they differ (or that they agree)."""

    what: str
    published: str
    derived: str
    remark: str


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned; a recipe gives one of its run.

    Attributes:
        title: what is planned, in a line.
        layout: of training; serving: of one engine, ``None`` without engines.
        compare: published figures beside those of the plan.
    """

    title: str
    shapes: Shapes
    gpu: Gpu
    gpus_per_node: int
    layout: Layout
    serving: Serving | None
    work: Workload
    compare: Callable[[Plan], Sequence[Compared]] = field(default=lambda plan: ())


@dataclass(frozen=True)
class Plan:
    """What was derived. ``problems`` is empty if it can run; ``stages`` is empty if the layout divides nothing."""

    request: PlanRequest
    problems: tuple[str, ...]
    stages: tuple[Stage, ...]
    fits: str
    cell: KvCell | None
    engine_weights_gib: float
    kv_tokens: int
    time: StepTime | None

    @property
    def sync_bytes(self) -> int:
        """Bytes of bf16 weights that an update sends, without the prediction layers."""
        return 2 * self.request.shapes.total

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: bytes and seconds as numbers, units in the keys."""
        request = self.request
        shapes, serving = request.shapes, request.serving
        return {
            "title": request.title,
            "gpu": asdict(request.gpu),
            "parameters": {
                "components": {c.name: {"count": c.count, "each": c.each, "total": c.total} for c in shapes.components},
                "total": shapes.total,
                "mtp": shapes.mtp,
                "total_with_mtp": shapes.total + shapes.mtp,
                "active": shapes.active_conventions,
            },
            "training": {
                "layout": {**asdict(request.layout), "dp": request.layout.dp if not self.problems else None},
                "tokens_per_rank": request.layout.tokens_per_rank if request.layout.cp > 0 else None,
                "fits": self.fits,
                "stages": [
                    {
                        "layers": [stage.first, stage.last],
                        "parameters": stage.parameters,
                        **{f"{name}_bytes": round(getattr(stage, name)) for name in PARTS},
                        "resident_bytes": round(stage.resident),
                        "total_bytes": round(stage.total),
                    }
                    for stage in self.stages
                ],
            },
            "serving": None
            if serving is None or self.cell is None
            else {
                **asdict(serving),
                "weights_gib_per_rank": self.engine_weights_gib,
                "kv_bytes_per_token_and_layer": self.cell.per_layer,
                "kv_parts_bytes": dict(self.cell.parts),
                "kv_layers": self.cell.layers,
                "kv_bytes_per_token": self.cell.per_token,
                "kv_tokens_per_rank": self.kv_tokens,
            },
            "weight_sync_bytes": self.sync_bytes,
            "step": None
            if self.time is None
            else {
                "training": [asdict(part) for part in self.time.training],
                "rollout": asdict(self.time.rollout),
                "weights": asdict(self.time.sync),
                "evaluation": asdict(self.time.evaluation),
                "overlap": self.time.overlap,
                "seconds": self.time.seconds,
                "seconds_with_evaluation": self.time.seconds_with_evaluation,
            },
            "assumptions": dict(assumptions(request.work, request.gpu)),
            "compared": [asdict(row) for row in request.compare(self)] if not self.problems else [],
            "problems": list(self.problems),
        }


PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""What a training rank holds, as :class:`~rlcore.plan.training.Stage` names it."""


def make_plan(request: PlanRequest) -> Plan:
    """Derive everything."""
    shapes, layout, serving, gpu = request.shapes, request.layout, request.serving, request.gpu
    wrong = [f"training: {problem}" for problem in problems(shapes, layout, request.gpus_per_node)]
    found = [] if wrong else stages(shapes, layout)
    state = fits(found, gpu) if found else "no"
    if found and state == "no":
        fullest = max(found, key=lambda stage: stage.resident)
        wrong.append(
            f"training: stage {fullest.index + 1} needs {fullest.resident / GIB:.1f} GiB a rank without optimizer state, "
            f"a {gpu.name} has {gpu.memory_gib} GiB"
        )
    if serving is not None:
        engine = [f"engine: {problem}" for problem in serving_problems(shapes, serving, gpu, layout.sequence)]
        sound = not any("divide" in problem or "at least" in problem for problem in engine)
        wrong += engine
    else:
        sound = False
    usable = serving if sound else None
    return Plan(
        request=request,
        problems=tuple(wrong),
        stages=tuple(found),
        fits=state,
        cell=kv_cell(shapes, usable) if usable else None,
        engine_weights_gib=weight_bytes(shapes, usable) / GIB if usable else 0.0,
        kv_tokens=kv_tokens_per_rank(shapes, usable, gpu) if usable else 0,
        time=step_time(shapes, layout, found, usable, gpu, request.work, request.gpus_per_node) if found else None,
    )
