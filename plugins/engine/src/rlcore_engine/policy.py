"""The policy client of the embedded engine: no wire, no copy, no second encoding."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rlcore.errors import ConfigError, PolicyUnavailable
from rlcore.types import Completion, FinishReason, ModelRequest, RunContext

if TYPE_CHECKING:
    from rlcore.protocols import Renderer

    from rlcore_engine.engine import EmbeddedEngine

__all__ = ["EmbeddedPolicy"]


class EmbeddedPolicy:
    """Implements :class:`rlcore.protocols.PolicyClient` over the run's own :class:`EmbeddedEngine`."""

    class Config(BaseModel):
        """``policy.name = "embedded"`` has no options."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        """The engine comes with :meth:`start`."""
        self._engine: EmbeddedEngine | None = None
        self._mine: set[str] = set()

    async def start(self, context: RunContext) -> None:
        """Take the run's engine."""
        from rlcore_engine.engine import EmbeddedEngine

        if not isinstance(context.engine, EmbeddedEngine):
            kind = type(context.engine).__name__
            raise ConfigError(f'policy.name = "embedded" needs engine.name = "embedded", but the engine is a {kind}')
        if context.engine.renderer is None:
            raise ConfigError(f"model.path: {context.engine.path} has no tokenizer.json")
        self._engine = context.engine

    @property
    def engine(self) -> EmbeddedEngine:
        """The engine; ``PolicyUnavailable`` before :meth:`start`."""
        if self._engine is None:
            raise PolicyUnavailable("the embedded policy is not started")
        return self._engine

    @property
    def renderer(self) -> Renderer | None:
        """The renderer of the engine's tokenizer."""
        return self.engine.renderer

    @property
    def context_length(self) -> int:
        """Tokens of a sequence."""
        return self.engine.worker.model.context_length

    async def complete(self, request: ModelRequest) -> Completion:
        """One generation; when ``request.seconds`` are over it is aborted."""
        if request.prompt_ids is None:
            raise PolicyUnavailable("the embedded policy takes token ids: the request has no prompt_ids")
        self._mine.add(request.id)
        try:
            async with asyncio.timeout(request.seconds):
                done = await self.engine.generate(
                    request.prompt_ids,
                    max_tokens=request.max_tokens,
                    sampling=request.sampling,
                    request_id=request.id,
                )
        except TimeoutError as error:
            raise PolicyUnavailable(f"request {request.id}: no answer within {request.seconds:g} s") from error
        finally:
            self._mine.discard(request.id)
        if done.finish is FinishReason.ABORT or done.versions is None:
            raise PolicyUnavailable(f"request {request.id} was aborted after {len(done.out)} tokens")
        renderer = self.engine.renderer
        return Completion(
            token_ids=tuple(done.out),
            logprobs=tuple(done.logprobs),
            finish_reason=done.finish or FinishReason.UNKNOWN,
            policy_version=done.versions[1],
            min_policy_version=done.versions[0],
            text=renderer.decode(done.out) if renderer else "",
            prompt_tokens=len(done.prompt),
            completion_tokens=len(done.out),
        )

    async def abort(self, request_id: str) -> None:
        """End a request by its id."""
        await self.engine.abort(request_id)

    async def running(self) -> frozenset[str] | None:
        """Ids that the engine works on."""
        return await self.engine.running()

    async def aclose(self) -> None:
        """Abort what this client still has open."""
        if self._engine is not None:
            for request_id in list(self._mine):
                await self._engine.abort(request_id)
