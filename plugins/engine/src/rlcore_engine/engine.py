"""The engine of a run: a model in this process, asked by token ids, given new weights in place."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rlcore.config import Secret
from rlcore.errors import ConfigError, PolicyUnavailable
from rlcore.types import Array, RunContext, Sampling

if TYPE_CHECKING:
    from rlcore.rollout.render import ChatRenderer

    from rlcore_engine.worker import Request, Worker

__all__ = ["EmbeddedEngine"]

Result = TypeVar("Result")


class EmbeddedEngine:
    """Implements :class:`rlcore.protocols.Engine` in process; :meth:`generate` and :meth:`stream` are its front.

    ``policy.name = "embedded"`` asks it without a wire; ``rlcore serve`` puts it behind HTTP. One worker thread owns the
    model; every coroutine here only waits for it.
    """

    class Config(BaseModel):
        """Options of ``engine.name = "embedded"``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
            None, description="what the engine computes in; unset: model.dtype"
        )
        side: Literal["auto", "llama", "transformers"] = Field(
            "auto", description="llama: the fast forward; transformers: any causal model; auto: fast where it can be"
        )
        slots: int = Field(32, ge=1, description="requests that decode together")
        queue: int = Field(1024, ge=0, description="requests that may wait for a slot; more are refused")
        context_length: int | None = Field(None, ge=2, description="tokens of a sequence; unset: what the model can")
        prefix_tokens: int = Field(8192, ge=0, description="tokens of finished requests that later prompts may reuse")
        chunk_tokens: int = Field(512, ge=1, description="prompt tokens computed between two decode steps")
        threads: int | None = Field(None, ge=1, description="threads of torch; unset: torch's own choice")
        port: int | None = Field(
            None, ge=0, le=65535, description="also serve HTTP on this port of the loopback interface; 0: a free one"
        )
        key: Secret | None = Field(None, description="key that HTTP clients must send; {env = NAME} or {file = PATH}")

    def __init__(self, config: Config) -> None:
        """Nothing is loaded before :meth:`start`."""
        self.config = config
        self.path: Path | None = None
        self.url: str | None = None
        self.renderer: ChatRenderer | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._seeds = random.Random()
        self._worker: Worker | None = None
        self._http = AsyncExitStack()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, context: RunContext) -> None:
        """Load ``context.model["path"]`` and begin to serve as version 0.

        Raises:
            ConfigError: no path, nothing that can be served there, or the port is in use.
        """
        if not context.model.get("path"):
            raise ConfigError("model.path is not set: the embedded engine needs a folder in Hugging Face format")
        self.path = Path(context.model["path"])
        self._seeds = random.Random(context.seed)
        await asyncio.to_thread(self._load, self.config.dtype or context.model.get("dtype", "auto"))
        if self.config.port is not None:
            from rlcore_engine.http.app import serving

            key = self.config.key.read() if self.config.key else None
            name = self.path.resolve().name
            self.url = await self._http.enter_async_context(serving(self, name=name, port=self.config.port, key=key))

    def _load(self, dtype: str) -> None:
        from rlcore_engine.models import load_model
        from rlcore_engine.worker import Worker

        assert self.path is not None
        config = self.config
        model = load_model(
            self.path,
            dtype=dtype,
            side=config.side,
            context_length=config.context_length,
            prefix_tokens=config.prefix_tokens,
            chunk_tokens=config.chunk_tokens,
        )
        if (self.path / "tokenizer.json").is_file():
            from rlcore_policies.tokenizer import load_renderer

            self.renderer = load_renderer(self.path)
            self._stop_ids = self.renderer.end_ids
        else:
            self._stop_ids = _stops(self.path)
        self._worker = Worker(model, slots=config.slots, queue=config.queue, threads=config.threads)

    async def aclose(self) -> None:
        """Abort what runs, free the port, end the thread and free the model."""
        if self._worker is not None:
            self._worker.abort(None)
        await self._http.aclose()
        self.url = None
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.stop)

    @property
    def worker(self) -> Worker:
        """The thread that owns the model. Raises ``PolicyUnavailable`` before :meth:`start` and after :meth:`aclose`."""
        if self._worker is None:
            raise PolicyUnavailable("the embedded engine is not started")
        return self._worker

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], **options: Any) -> Request:
        """One generation, whole. A cancelled call frees its slot before the next token is sampled.

        Args:
            prompt_ids: ``[P]`` token ids.
            options: ``max_tokens``, and as they are needed ``sampling``, ``request_id``, ``stop_ids`` (more of them),
                ``ignore_stops``.

        Raises:
            PolicyUnavailable: bad prompt, id in use, or the engine failed.
            Throttled: too many requests wait.
        """
        return [request async for request in self._run(prompt_ids, every_token=False, **options)][-1]

    async def stream(self, prompt_ids: Sequence[int], **options: Any) -> AsyncIterator[Request]:
        """The same request again and again, each time with more tokens, at last with ``finish``; see :meth:`generate`."""
        async for request in self._run(prompt_ids, every_token=True, **options):
            yield request

    async def _run(
        self,
        prompt_ids: Sequence[int],
        *,
        every_token: bool,
        max_tokens: int,
        sampling: Sampling | None = None,
        request_id: str | None = None,
        stop_ids: Iterable[int] = (),
        ignore_stops: bool = False,
    ) -> AsyncIterator[Request]:
        from rlcore_engine.worker import Request

        if max_tokens < 1:
            raise PolicyUnavailable(f"max_tokens is {max_tokens}; at least 1")
        worker, sampling = self.worker, sampling or Sampling()
        bad = next((i for i in prompt_ids if not 0 <= i < worker.model.vocab_size), None)
        if bad is not None:
            raise PolicyUnavailable(f"token id {bad} is not in the vocabulary of {worker.model.vocab_size}")
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notify(request: Request) -> None:
            if (every_token or request.finish is not None) and not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        request = Request(
            id=request_id or secrets.token_hex(16),
            prompt=tuple(prompt_ids),
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=frozenset(stop_ids) | (frozenset() if ignore_stops else self._stop_ids),
            notify=notify,
        )
        worker.submit(request)
        try:
            finished = False
            while not finished:
                await changed.wait()
                changed.clear()
                finished = request.finish is not None
                if request.error:
                    raise request.error
                yield request
        finally:
            if request.finish is None:
                worker.abort(request.id)

    async def abort(self, request_id: str | None) -> None:
        """End a request by its id, or all for ``None``: their answers are what was sampled so far, with ``abort``."""
        self.worker.abort(request_id)

    async def running(self) -> frozenset[str]:
        """Ids of what is worked on or waits."""
        return self.worker.running()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["in_place", "retract", "abort"] = "in_place") -> None:
        """Sample nothing until :meth:`resume`; new requests are taken and held.

        ``in_place``: what runs keeps its place, keys and values. ``retract``: what runs is computed anew from its tokens
        when it goes on, with the weights of then. ``abort``: what runs or waits now is ended.
        """
        worker = self.worker
        await self._call(lambda: worker.pause(retract=mode == "retract"))
        if mode == "abort":
            worker.abort(None)
            await self._call(lambda: None)

    async def resume(self) -> None:
        """Go on; what was held begins."""
        await self._call(self.worker.resume)

    async def flush(self) -> None:
        """Forget every cached prefix; nothing that runs now is cached later."""
        await self._call(self.worker.flush)

    async def update_weights(self, version: int, weights: Iterable[tuple[str, Array]]) -> None:
        """Load all weights and forget every prefix, between two tokens; on any error the old ones stay.

        Raises:
            ConfigError: missing, unexpected or misshapen tensors, all named.
        """
        worker = self.worker
        tensors = list(weights)
        await self._call(lambda: worker.update(version, tensors))

    @property
    def version(self) -> int:
        """Version of the weights that serve now."""
        return self.worker.version

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self.worker.call(function))


def _stops(folder: Path) -> frozenset[int]:
    """Stop ids of a model without a tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    generation = folder / "generation_config.json"
    source = GenerationConfig.from_pretrained(folder) if generation.is_file() else AutoConfig.from_pretrained(folder)
    eos = source.eos_token_id
    return frozenset() if eos is None else frozenset(eos if isinstance(eos, list) else [eos])
