"""``rlcore plan``: what a model needs on given hardware, from its shapes, and which layouts would do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from rlcore.cli import Globals
from rlcore.cli._run_options import ConfigOption, SetOption, resolve_run
from rlcore.cli._tables import print_table
from rlcore.errors import ConfigError
from rlcore.plan.hardware import gpu_named
from rlcore.plan.report import Plan, PlanRequest, make_plan
from rlcore.plan.serving import GIB, Serving
from rlcore.plan.shapes import Shapes
from rlcore.plan.steps import Workload, assumptions
from rlcore.plan.suggest import Suggestions, balanced_split, say, suggest
from rlcore.plan.training import ADAM_BYTES, Layout
from rlcore.plugins import Plugins, nearest
from rlcore.protocols import PlannedRecipe
from rlcore.resolve import build_options, options_class, set_layer

__all__ = ["plan"]

GROUPS: Mapping[str, type] = {"training": Layout, "serving": Serving, "workload": Workload}
"""What ``--set GROUP.KEY=VALUE`` changes of the plan itself; every other key belongs to the recipe's configuration."""

SHOWN = 12
"""Suggested layouts in the table."""


def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE|MODEL", help="A recipe, or a model folder or config.json of Hugging Face."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="gb300, b200, h200 or h100.")] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    search: Annotated[bool, typer.Option("--suggest", help="Search layouts that fit, best first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON; units are in the keys.")] = False,
) -> int:
    """Say what a model needs on given hardware, from its shapes: memory, cache, weights to send, time of a step.

    --set training.KEY, serving.KEY and workload.KEY change the plan (training.tp=4, training.split=18-20-20-20,
    workload.mfu=0.3); other keys are the recipe's. Exit status 2 if it cannot run.
    """
    own, others = _divide(sets or ())
    if recipe is not None and (Path(recipe).is_dir() or recipe.endswith(".json")):
        if others or config:
            raise ConfigError(f"{(others or ['--config'])[0]}: a model has no recipe's keys; use {', '.join(GROUPS)}")
        request = _of_model(Path(recipe), nodes, gpu)
    else:
        request = _of_recipe(context, recipe, nodes, gpu, config, others)
    request = _changed(context.obj.plugins, request, own)
    made = make_plan(request)
    found = (
        suggest(request.shapes, request.layout, request.gpu, request.work, request.gpus_per_node) if search else None
    )
    if as_json:
        print(json.dumps(made.to_dict() | ({"suggestions": _suggestions(found)} if found else {}), indent=2))
    else:
        _print(made)
        if found:
            _print_suggestions(found, request.layout)
        for problem in made.problems:
            print(f"cannot run: {problem}")
    return 2 if made.problems else 0


def _of_model(path: Path, nodes: int | None, gpu: str | None) -> PlanRequest:
    """Nodes of the usual size, one engine of as many of their GPUs, and training that divides what it can."""
    shapes, kind = Shapes.read(path), gpu_named(gpu or "h200")
    gpus = (nodes or 1) * kind.per_node
    tp = kind.per_node
    while shapes.heads % tp or (not shapes.latent and shapes.kv_heads % tp):
        tp //= 2
    ep = kind.per_node if shapes.experts else 1
    while shapes.experts and shapes.experts % ep:
        ep //= 2
    row = min(shapes.max_positions or 8192, 65536)
    serving = Serving(gpus=tp, ep=1, dp_attention=1, weight_bits=16, kv_bits=16, mtp=False)
    if shapes.experts:
        serving = replace(serving, gpus=kind.per_node, ep=ep, dp_attention=kind.per_node)
    work = Workload(row_tokens=row // 4, sampled_tokens=row // 16)
    layout = Layout(gpus, tp=tp, ep=ep, sequence=row)
    return PlanRequest(f"{path}", shapes, kind, kind.per_node, layout, serving, work)


def _of_recipe(
    context: typer.Context,
    recipe: str | None,
    nodes: int | None,
    gpu: str | None,
    config: Sequence[Path] | None,
    sets: Sequence[str],
) -> PlanRequest:
    known: Globals = context.obj
    if recipe is not None and not config and recipe not in (names := known.plugins.names("recipe")):
        raise ConfigError(
            f"{recipe!r} is neither a recipe nor a folder or config.json of a model{nearest(recipe, names)}"
        )
    given = [*sets]
    hardware = {"nodes": nodes, "gpu": gpu}
    name = recipe or (known.plugins.default_recipe(known.named[0]) if known.named else None)
    if name is not None and name in known.plugins.names("recipe"):
        options = options_class(known.plugins, "recipe", name).model_fields
        given += [f"recipe.{key}={value}" for key, value in hardware.items() if value is not None and key in options]
    resolved = resolve_run(context, recipe, config, given, as_a_whole=False)
    if isinstance(resolved.recipe, PlannedRecipe):
        return resolved.recipe.plan(resolved.config)
    model = resolved.config.model.path
    if model is None or not (Path(model) / "config.json").is_file():
        raise ConfigError(f"recipe {resolved.name!r} has no plan of its own: name the folder of its model")
    return _of_model(Path(model), nodes, gpu)


def _divide(sets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the plan, and the others."""
    own = [setting for setting in sets if setting.lstrip().startswith(tuple(f"{group}." for group in GROUPS))]
    return own, [setting for setting in sets if setting not in own]


def _changed(plugins: Plugins, request: PlanRequest, settings: Sequence[str]) -> PlanRequest:
    built = build_options(plugins, [set_layer(settings)], {group: _options(group) for group in GROUPS})
    changes = {group: options.model_dump(exclude_unset=True) for group, options in built.items()}
    training = changes["training"]
    if training.get("pp") and "split" not in training:
        training["split"] = balanced_split(request.shapes, training["pp"])
    return replace(
        request,
        layout=replace(request.layout, **training),
        serving=request.serving and replace(request.serving, **changes["serving"]),
        work=replace(request.work, **changes["workload"]),
    )


def _options(group: str) -> Any:
    """What ``--set`` can change of a part of the plan, and within which bounds."""
    from pydantic import BeforeValidator, ConfigDict, Field, create_model

    kinds: Mapping[Any, Any] = {
        int: Annotated[int, Field(ge=0)],
        float: Annotated[float, Field(ge=0, allow_inf_nan=False)],
        str: Literal["full", "none"],
        tuple[int, ...]: Annotated[tuple[int, ...], BeforeValidator(_split_of)],
    }
    fields = {name: (kinds.get(wanted, wanted), None) for name, wanted in get_type_hints(GROUPS[group]).items()}
    return create_model(group, __config__=ConfigDict(extra="forbid"), **fields)  # type: ignore[call-overload]


def _split_of(value: Any) -> Any:
    """``18-20-20-20`` (also with commas) as numbers."""
    if isinstance(value, list):
        return value
    try:
        return [int(part) for part in re.split("[-,]", str(value)) if value != ""]
    except ValueError:
        raise ValueError(f"should be layers of each stage, as in 18-20-20-20, not {value!r}") from None


def _print(made: Plan) -> None:
    request = made.request
    shapes, gpu = request.shapes, request.gpu
    print(f"{request.title}, {gpu.name}: {gpu.memory_gib} GiB usable a GPU, {request.gpus_per_node} GPUs a node")
    print("GB is 1e9 bytes, GiB is 2^30 bytes\n")
    rows = [[c.name, f"{c.count:,}", f"{c.each:,}", f"{c.total:,}"] for c in shapes.components]
    rows.append(["total", "", "", f"{shapes.total:,}"])
    if shapes.mtp:
        rows += [["MTP layers", "", "", f"{shapes.mtp:,}"], ["with MTP", "", "", f"{shapes.total + shapes.mtp:,}"]]
    rows += [[f"active, {name}", "", "", f"{count:,}"] for name, count in shapes.active_conventions.items()]
    print_table("parameters", ["component", "count", "elements of one", "elements"], rows)
    if made.stages:
        _print_training(made)
    if made.cell is not None and request.serving is not None:
        _print_serving(made, request.serving)
    print(f"weights of an update: {made.sync_bytes / 1e9:,.1f} GB (bf16, without MTP)\n")
    if made.time is not None:
        _print_time(made)
    compared = [] if made.problems else list(request.compare(made))
    if compared:
        print("published figures beside these")
        for row in compared:
            print(f"  {row.what}: published {row.published}; here {row.derived}. {row.remark}")
        print()


def _print_training(made: Plan) -> None:
    layout = made.request.layout
    rows = []
    for stage in made.stages:
        sizes = (stage.weights, stage.gradients, stage.optimizer, stage.activations, stage.logits, stage.buffers)
        held = (stage.resident, stage.total)
        rows.append(
            [
                f"{stage.index + 1}",
                f"{stage.first}-{stage.last}",
                f"{stage.parameters / 1e9:.2f}",
                *(f"{size / 1e9:.1f}" for size in sizes),
                *(f"{size / GIB:.1f}" for size in held),
            ]
        )
    columns = ["stage", "layers", "parameters 1e9", "weights GB", "gradients GB", "optimizer GB", "activations GB"]
    columns += ["logits GB", "buffers GB", "without optimizer GiB", "all GiB"]
    where = {
        "on the GPU": "everything fits on the GPU",
        "streamed": "fits with the optimizer state streamed to disk or host memory",
        "no": "does not fit",
    }[made.fits]
    title = (
        f"training, one rank: {layout.gpus} GPUs, {say(layout)}, split {'-'.join(map(str, _split(made)))}, "
        f"{layout.sequence:,} tokens a row, {layout.tokens_per_rank:,} a rank, recompute {layout.recompute}: {where}"
    )
    print_table(title, columns, rows)
    average = made.request.shapes.total * ADAM_BYTES / layout.gpus
    print(
        f"  optimizer state on average: {average / 1e9:.0f} GB a rank ({ADAM_BYTES} bytes a parameter, DP {layout.dp})\n"
    )


def _split(made: Plan) -> list[int]:
    return [stage.last - stage.first + 1 for stage in made.stages]


def _print_serving(made: Plan, serving: Serving) -> None:
    cell, gpu = made.cell, made.request.gpu
    assert cell is not None
    used = gpu.memory_gib * serving.memory_fraction
    rows = [
        ["engines", f"{serving.engines} of {serving.gpus} GPUs"],
        ["attention", f"data parallel {serving.dp_attention}" if serving.dp_attention > 1 else "tensor parallel"],
        ["expert parallel", f"{serving.ep}"],
        ["weights of a rank", f"{made.engine_weights_gib:.1f} GiB in {serving.weight_bits} bits"],
        ["buffers of a rank", f"{serving.buffers_gib:.1f} GiB (assumed)"],
        ["memory fraction", f"{serving.memory_fraction:.2f} of {gpu.memory_gib} GiB = {used:.1f} GiB"],
        ["cell", " + ".join(f"{name} {size} B" for name, size in cell.parts) + f" = {cell.per_layer} B a layer"],
        ["a token", f"{cell.per_layer} B × {cell.layers} layers = {cell.per_token:,} B"],
        ["cache of a rank", f"{made.kv_tokens:,} tokens"],
    ]
    print_table("engine, one rank", ["what", "value"], rows)


def _print_time(made: Plan) -> None:
    time = made.time
    assert time is not None
    rows = [[f"training: {part.name}", f"{part.seconds:.1f}", part.why] for part in time.training]
    rows += [[part.name, f"{part.seconds:.1f}", part.why] for part in (time.rollout, time.sync)]
    together = "the longer of training and rollout" if time.overlap else "training and rollout"
    rows.append(["a step", f"{time.seconds:.1f}", f"{together}, then the weights"])
    if time.evaluation.seconds:
        rows.append(["evaluation", f"{time.evaluation.seconds:.1f}", time.evaluation.why])
        rows.append(["a step, evaluation included", f"{time.seconds_with_evaluation:.1f}", "spread over all steps"])
    print_table("time of a step (an estimate)", ["part", "seconds", "how"], rows)
    print_table("assumed", ["what", "value"], [list(row) for row in assumptions(made.request.work, made.request.gpu)])


def _print_suggestions(found: Suggestions, own: Layout) -> None:
    rows = []
    for c in found.fitting[:SHOWN]:
        split = "-".join(map(str, c.layout.split))
        rows.append([say(c.layout), split, c.state, f"{c.peak_gib:.1f}", f"{c.seconds:.1f}"])
    title = f"layouts that fit, best first ({min(SHOWN, len(found.fitting))} of {len(found.fitting)})"
    print_table(title, ["layout", "split", "optimizer state", "fullest rank GiB", "training s"], rows)
    degrees = (own.tp, own.pp, own.cp, own.ep, own.etp)
    for place, c in enumerate(found.fitting, 1):
        if (c.layout.tp, c.layout.pp, c.layout.cp, c.layout.ep, c.layout.etp) == degrees:
            print(f"  the planned degrees, {say(own)}, are number {place}: {c.seconds:.1f} s with the best split\n")
    refused = [[f"{r.count:,}", r.reason, r.example] for r in found.rejected]
    print_table("layouts that do not work", ["how many", "reason", "for example"], refused)


def _suggestions(found: Suggestions) -> dict[str, Any]:
    return {
        "fitting": [
            {"layout": asdict(c.layout), "optimizer": c.state, "peak_gib": c.peak_gib, "training_seconds": c.seconds}
            for c in found.fitting
        ],
        "rejected": [asdict(r) for r in found.rejected],
    }
