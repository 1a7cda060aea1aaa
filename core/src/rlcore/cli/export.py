"""``rlcore export``: the weights of a run's newest complete checkpoint as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcore.cli._run_options import SetOption, resolve_saved
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.plugins import Plugins
    from rlcore.protocols import Trainer
    from rlcore.types import RunContext

__all__ = ["export"]


def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not hold anything yet.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest complete one.")] = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> int:
    """Write a run's weights as a Hugging Face model: ``transformers.AutoModelForCausalLM.from_pretrained(DIR)``."""
    from rlcore.types import RunContext

    plugins: Plugins = context.obj.plugins
    config = resolve_saved(context, run, sets).config
    checkpoint = _checkpoint(run, step)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder: choose another")
    trainer: Trainer = plugins.load("trainer", config.trainer.name)(config.trainer.options)
    facts = RunContext(run.name, run, config.run.seed, config.model.model_dump())
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        asyncio.run(_write(trainer, facts, checkpoint, staging))
        staging.chmod(0o755)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    number = int(checkpoint.name.removeprefix("step-"))
    if as_json:
        print(json.dumps({"run": str(run), "step": number, "path": str(target)}))
    else:
        print(f"step {number} of {run} is in {target}")
    return 0


def _checkpoint(run: Path, step: int | None) -> Path:
    from rlcore.learn.checkpoints import complete

    found = {int(path.name.removeprefix("step-")): path for path in complete(run / "checkpoints")}
    if not found:
        raise ConfigError(f"{run}: no complete checkpoint to export")
    if step is not None and step not in found:
        raise ConfigError(f"{run}: no complete checkpoint of step {step}; there are {', '.join(map(str, found))}")
    return found[max(found) if step is None else step]


async def _write(trainer: Trainer, facts: RunContext, checkpoint: Path, target: Path) -> None:
    try:
        await trainer.start(facts)
        await trainer.load(checkpoint)
        await trainer.export(target)
    finally:
        await trainer.aclose()
