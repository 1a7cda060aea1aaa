"""The single-process trainer: what the loop calls, and the one thread in which the work is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import RlcoreError
from rlcore.protocols import Objective, StepResult
from rlcore.types import Array, Batch, RunContext

from rlcore_torch.memory import keep_freed_memory

if TYPE_CHECKING:
    from rlcore_torch.worker import Worker

__all__ = ["TorchTrainer"]

Result = TypeVar("Result")


class TorchTrainer:
    """Trains any causal Hugging Face model on the CPU or one GPU.

    Weights are float32 masters; the forward and backward run in ``dtype``. Everything heavy runs in one thread of its
    own beside the event loop. A step that is cancelled stops at the next layer and leaves the weights as they were.
    See :class:`rlcore.protocols.Trainer`.
    """

    class Config(BaseModel):
        """Options of the optimizer and of how a step is computed."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(1e-6, ge=0, description="learning rate of AdamW")
        betas: tuple[float, float] = Field((0.9, 0.95), description="decay of AdamW's two moments")
        eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
        weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices; vectors have none")
        max_grad_norm: float = Field(1.0, gt=0, description="the global gradient norm is clipped to this")
        warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises linearly")
        epochs: int = Field(1, ge=1, description="updates that are made with the whole of each batch")
        micro_batch_tokens: int = Field(2048, ge=1, description="positions of one forward; a longer row runs alone")
        share_prefixes: bool = Field(True, description="compute equal prefixes of a micro-batch once, where it pays")
        logprob_chunk: int | None = Field(
            None, ge=1, description="rows of logits that are held at once; default: 64 MiB"
        )
        reference_path: str | None = Field(
            None, description="folder of the frozen policy that some losses compare with; default: model.path"
        )
        dtype: Literal["auto", "float32", "bfloat16"] = Field(
            "auto",
            description="what the forward computes in; auto: as model.dtype, and if that is auto: bfloat16 "
            "where the hardware multiplies it faster",
        )
        device: str = Field("auto", description="cpu, cuda, cuda:1, …; auto: cuda where there is one")
        threads: int | None = Field(None, ge=1, description="CPU threads of the trainer; default: torch's own choice")
        gradient_checkpointing: bool = Field(False, description="compute activations again instead of keeping them")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._executor: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self._loaded: Worker | None = None

    async def start(self, context: RunContext) -> None:
        """See :class:`rlcore.protocols.Trainer`. Raises ``ConfigError`` naming ``model.path`` or ``trainer.device``."""
        if self._executor is None:
            keep_freed_memory()
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="rlcore-torch")
        self._loaded = await self._run(self._load, context)

    async def step(self, batch: Batch, objective: Objective) -> StepResult:
        """See :class:`rlcore.protocols.Trainer`."""
        return await self._run(self._worker.step, batch, objective, self._stop)

    def weights(self) -> Iterable[tuple[str, Array]]:
        """See :class:`rlcore.protocols.Trainer`. The tensors are the live ones: copy them before the next step."""
        return self._worker.weights()

    async def save(self, directory: Path) -> None:
        """See :class:`rlcore.protocols.Trainer`."""
        await self._run(self._worker.save, Path(directory))

    async def load(self, directory: Path) -> None:
        """See :class:`rlcore.protocols.Trainer`. Raises ``ConfigError`` if it is a checkpoint of another model."""
        await self._run(self._worker.load, Path(directory))

    async def export(self, directory: Path) -> None:
        """See :class:`rlcore.protocols.Trainer`. The dtype is that of the forward: what was sampled from."""
        await self._run(self._worker.export, Path(directory))

    async def aclose(self) -> None:
        """See :class:`rlcore.protocols.Trainer`."""
        self._stop.set()
        executor, self._executor, self._loaded = self._executor, None, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)

    @property
    def _worker(self) -> Worker:
        if self._loaded is None:
            raise RlcoreError("the torch trainer is not started (or is closed): await start(context) first")
        return self._loaded

    def _load(self, context: RunContext) -> Worker:
        from rlcore_torch.worker import Worker

        return Worker(self.config, context)

    async def _run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run in the trainer's thread. Cancelled, it asks the thread to stop and waits until it has."""
        if self._executor is None:
            raise RlcoreError("the torch trainer is closed")
        self._stop.clear()
        future = self._executor.submit(work, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._stop.set()
            if not future.done():
                await _quietly(future)
            raise


async def _quietly(future: Any) -> None:
    """Wait for a thread's end whatever it ends with, also if the waiting task is cancelled again."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    waiting = asyncio.ensure_future(done.wait())
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            continue
