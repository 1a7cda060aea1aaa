"""The work of the trainer, synchronous, in one thread."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rlcore.errors import ConfigError
from rlcore.protocols import Objective, StepResult
from rlcore.types import Batch, RunContext

from rlcore_torch import checkpoint
from rlcore_torch.adamw import MasterAdamW
from rlcore_torch.model import CausalModel, compute_dtype
from rlcore_torch.update import Stopped, Update

if TYPE_CHECKING:
    from rlcore_torch.trainer import TorchTrainer

__all__ = ["Worker"]

_log = logging.getLogger(__name__)


class Worker:
    """The model, its optimizer, and what the trainer does with them.

    Attributes:
        config: the trainer's options.
        model: the module and how it is computed.
        optimizer: masters and moments.
        dtype: what the forward computes in.
    """

    def __init__(self, config: TorchTrainer.Config, context: RunContext) -> None:
        self.config = config
        self._path = config.reference_path or context.model.get("path")
        self._reference: CausalModel | None = None
        device = _device(config.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.model = CausalModel(context.model.get("path"), device, config.gradient_checkpointing)
        wanted = config.dtype if config.dtype != "auto" else str(context.model.get("dtype", "auto"))
        self.dtype = compute_dtype(wanted, self.model.hidden_size, device)
        self.optimizer = MasterAdamW(
            self.model.parameters(),
            self.model.dtypes(self.dtype),
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        _log.info(
            "%s: %.1f M parameters, forward in %s on %s, shared prefixes %s",
            self.model.path,
            sum(p.numel() for p in self.optimizer.parameters.values()) / 1e6,
            str(self.dtype).removeprefix("torch."),
            device,
            "on" if config.share_prefixes and self.model.can_share else "off",
        )

    def step(self, batch: Batch, objective: Objective, stop: threading.Event) -> StepResult:
        """See :class:`rlcore.protocols.Trainer`; stops with the weights as they were once ``stop`` is set."""
        if batch.tokens == 0:
            nothing = [[math.nan] * len(sample.token_ids) for sample in batch.samples]
            return StepResult({"tokens": 0.0, "skipped": 1.0, "nonfinite": 0.0}, nothing)

        def heed() -> None:
            if stop.is_set():
                raise Stopped

        self.model.heed = heed
        try:
            return Update(self, batch, objective, heed).run()
        except Stopped:
            self.optimizer.clear()
            raise

    @property
    def reference(self) -> CausalModel:
        """The frozen reference policy, loaded when it is first asked for."""
        if self._reference is None:
            self._reference = CausalModel(self._path, self.model.device, gradient_checkpointing=False)
            dtypes = self._reference.dtypes(self.dtype)
            for name, parameter in self._reference.parameters().items():
                parameter.data = parameter.data.to(dtypes[name])
            self._reference.module.requires_grad_(False)
        return self._reference

    def learning_rate(self) -> float:
        """Of the next update."""
        warmup = self.config.warmup_steps
        return self.config.lr * (min(1.0, (self.optimizer.updates + 1) / warmup) if warmup else 1.0)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Live tensors in the forward's dtype, named as in the checkpoint."""
        return self.model.checkpoint_tensors()

    def save(self, directory: Path) -> None:
        """Write everything that :meth:`load` needs."""
        checkpoint.save(directory, self.optimizer)

    def load(self, directory: Path) -> None:
        """Continue where :meth:`save` was called."""
        checkpoint.load(directory, self.optimizer)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face folder."""
        with checkpoint.writing(directory):
            self.model.export(directory)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"trainer.device = {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
