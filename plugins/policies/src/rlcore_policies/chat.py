"""A client of any OpenAI-compatible chat endpoint: messages in, text out. For evaluation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rlcore.config import Secret
from rlcore.errors import ConfigError, PolicyUnavailable
from rlcore.types import Completion, Message, ModelRequest, RunContext

from rlcore_policies._answers import BaseUrl, excerpt, finish_reason, header, json_object, refuse
from rlcore_policies._calls import Calls

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["OpenAIClient"]

OPENAI = "https://api.openai.com/v1"


class OpenAIClient:
    """Implements :class:`rlcore.protocols.PolicyClient` with the official SDK, without its retries.

    It has no token ids, so what it samples cannot be trained. Requests end with their connection: such servers have no
    route for an abort. Every request carries its id as ``X-Request-Id`` and its session as ``X-Session-Id``.
    """

    class Config(BaseModel):
        """Options of the policy client ``openai``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        base_url: BaseUrl = Field(
            OPENAI, description="URL up to and including /v1; proxies of the environment are not used"
        )
        model: str | None = Field(None, description="the model's name; default: the only one that the server has")
        api_key: Secret | None = Field(
            None, description="{env = NAME} or {file = PATH}; default: OPENAI_API_KEY, for OpenAI's own URL only"
        )
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
            "max_tokens", description="how this server calls the cap of a turn"
        )
        send_sampling: bool = Field(True, description="send temperature, top_p and seed; some models refuse them")
        extra_body: dict[str, Any] = Field(default_factory=dict, description="more keys for the body of every request")
        start_seconds: float = Field(30.0, gt=0, description="time for the server to say which models it has")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._client: AsyncOpenAI | None = None
        self._model = config.model
        self._calls = Calls(_only_disconnect)

    async def start(self, context: RunContext) -> None:
        """Connect; asks the server for its model if none is configured.

        Raises:
            ConfigError: no key, or no single model to choose.
            PolicyUnavailable: the server does not say which models it has.
        """
        from openai import DEFAULT_CONNECTION_LIMITS, AsyncOpenAI, DefaultAsyncHttpxClient

        # the SDK brings its own HTTP library: its class of limits is that of its default. No connection is used twice (a
        # server that closes it meanwhile loses the request), and no redirect is followed: both would send a request again
        limits = type(DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=0)
        self._client = AsyncOpenAI(
            base_url=self._config.base_url,
            api_key=self._key(),
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(trust_env=False, follow_redirects=False, limits=limits),
        )
        if self._model is None:
            self._model = await self._only_model()

    @property
    def renderer(self) -> None:
        """None: this client takes messages."""
        return None

    async def complete(self, request: ModelRequest) -> Completion:
        """One chat completion, sent once."""
        return await self._calls.run(request.id, self._complete(request), request.seconds)

    async def abort(self, request_id: str) -> None:
        """Nothing: a request ends with its connection, which :meth:`complete` closes."""

    async def running(self) -> None:
        """None: the server cannot tell."""
        return None

    async def aclose(self) -> None:
        """End what is open and close the connections."""
        await self._calls.close()
        if self._client is not None:
            await self._client.close()

    async def _complete(self, request: ModelRequest) -> Completion:
        body: dict[str, Any] = {self._config.max_tokens_field: request.max_tokens}
        sampling = request.sampling
        if self._config.send_sampling:
            body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            body |= {} if sampling.seed is None else {"seed": sampling.seed % 2**31}
            body |= {} if sampling.top_k < 1 else {"top_k": sampling.top_k}
        client = self._connected()
        answer = await self._answer(
            client.chat.completions.with_raw_response.create(
                model=self._model or "",
                messages=[_clean(message.to_dict()) for message in request.messages],  # type: ignore[misc]
                extra_body={**body, **self._config.extra_body},
                extra_headers={"X-Request-Id": header(request.id), "X-Session-Id": header(request.session_id)},
                timeout=request.seconds,
            )
        )
        return _completion(answer, f"{self._config.base_url} (model {self._model})")

    async def _answer(self, call: Awaitable[Any]) -> dict[str, Any]:
        """The answer's JSON as it came: the SDK's own models take a page of HTML for an answer."""
        import openai

        where = self._config.base_url
        try:
            response = await call
        except openai.APIStatusError as error:
            refuse(error.status_code, error.response.headers, error.response.content, where)
        except openai.APIConnectionError as error:  # its time-out is one of these
            raise PolicyUnavailable(f"{where}: {error} ({error.__cause__ or 'no more is known'})") from error
        except openai.APIError as error:
            raise PolicyUnavailable(f"{where}: {error}") from error
        return json_object(response.content, where)

    def _connected(self) -> AsyncOpenAI:
        if self._client is None:
            raise PolicyUnavailable("the client was not started")
        return self._client

    async def _only_model(self) -> str:
        seconds = self._config.start_seconds
        call = self._connected().models.with_raw_response.list(timeout=seconds)
        answer = await self._calls.run("models", self._answer(call), seconds)
        names = [model.get("id") for model in answer.get("data") or [] if isinstance(model, dict)]
        if len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"policy.model: name one of the models of {self._config.base_url}: {names[:20]}")
        return names[0]

    def _key(self) -> str:
        if self._config.api_key is not None:
            return self._config.api_key.read()
        if self._config.base_url != OPENAI:
            return "none"  # the SDK wants one; the environment's is not for this server
        if not (key := os.environ.get("OPENAI_API_KEY", "").strip()):
            raise ConfigError(
                "policy.api_key: OpenAI wants a key: set OPENAI_API_KEY, or policy.base_url for another server"
            )
        return key


async def _only_disconnect(request_id: str, task: asyncio.Task[Any]) -> None:
    """Such servers have no route for an abort: the connection that closes must do."""


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """Without lone surrogates, which no UTF-8 body can hold."""
    if isinstance(message.get("content"), str):
        from rlcore.rollout.render import scrub

        message["content"] = scrub(message["content"])
    return message


def _completion(answer: Mapping[str, Any], where: str) -> Completion:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    raw = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(raw, dict):
        raise PolicyUnavailable(f"{where}: an answer without a message: {excerpt(str(dict(answer)))}")
    # null and empty keys say nothing, and servers that send them refuse them
    message = {key: value for key, value in raw.items() if value is not None and value != []}
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    said = Message.from_dict({**message, "role": "assistant", "content": content})
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Completion(
        token_ids=(),
        logprobs=(),
        finish_reason=finish_reason(choice.get("finish_reason")),
        text=said.content,
        message=said,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
