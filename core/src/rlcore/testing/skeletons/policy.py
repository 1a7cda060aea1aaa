"""A policy client: asks a model behind HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import PolicyUnavailable, Throttled
from rlcore.protocols import Renderer
from rlcore.types import Completion, FinishReason, Message, ModelRequest, RunContext

if TYPE_CHECKING:
    import httpx


class Skeleton:
    """Posts ``{"messages", "max_tokens", "temperature"}`` and reads ``{"text", "finish_reason"}``.

    It takes messages and gives text: good for evaluation. For training give it a ``renderer``, send
    ``request.prompt_ids`` and return ``token_ids`` with their ``logprobs``.
    """

    class Config(BaseModel):
        """Options of this client."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        base_url: str = Field("http://127.0.0.1:8000", description="where the server is")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._http: httpx.AsyncClient | None = None

    async def start(self, context: RunContext) -> None:
        """Connect; see :class:`rlcore.protocols.PolicyClient`."""
        import httpx

        # a local engine is not asked through a proxy, and no pool holds requests back: the run bounds them
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=self.config.base_url, trust_env=False, timeout=None, limits=limits)

    @property
    def renderer(self) -> Renderer | None:
        """None: this client takes messages."""
        return None

    async def complete(self, request: ModelRequest) -> Completion:
        """One generation, sent once; leaving the block closes the connection, which ends it at the server."""
        body = {
            "messages": [message.to_dict() for message in request.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
        }
        try:
            async with asyncio.timeout(request.seconds):
                answer = await self._post(body)
        except TimeoutError as error:
            raise PolicyUnavailable(f"no answer within {request.seconds:g} s") from error
        text, reason = answer.get("text"), answer.get("finish_reason")
        if not isinstance(text, str) or reason not in list(FinishReason):
            raise PolicyUnavailable(f"not an answer: {str(answer)[:200]}")
        return Completion((), (), FinishReason(reason), text=text, message=Message("assistant", text))

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        import httpx

        assert self._http is not None, "start() comes first"
        try:
            response = await self._http.post("/generate", json=body)
        except httpx.HTTPError as error:
            raise PolicyUnavailable(f"{self.config.base_url}: {type(error).__name__}: {error}") from error
        if response.status_code == 429:
            raise Throttled(f"{self.config.base_url}: {response.text[:200]}")
        if response.status_code != 200:
            raise PolicyUnavailable(f"{self.config.base_url}: status {response.status_code}: {response.text[:200]}")
        try:
            answer = response.json()
        except ValueError as error:
            raise PolicyUnavailable(f"{self.config.base_url}: not JSON: {response.text[:200]}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}

    async def abort(self, request_id: str) -> None:
        """This server has no abort: a closed connection ends a request."""

    async def running(self) -> frozenset[str] | None:
        """This server does not tell."""
        return None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
