"""OpenAI's ``/v1/chat/completions`` and ``/v1/models``, with SGLang's token ids for those who ask."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import ConfigError
from rlcore.types import Message

from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.http.generate import finish_of
from rlcore_engine.http.sampling import Options, Part, generate
from rlcore_engine.http.wire import EventStream, WireError, unless_gone

__all__ = ["router"]

router = APIRouter()


class TextPart(BaseModel):
    """A part of a content; there are no others here."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; whatever else it carries reaches the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def to_message(self) -> Message:
        """With one text as its content."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or [])
        return Message(self.role, text, self.model_extra or {})


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class ChatRequest(Options):
    """The body of a chat completion: what is not built here is refused by name."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None
    n: Literal[1] | None = None
    frequency_penalty: Literal[0, 0.0] | None = None
    presence_penalty: Literal[0, 0.0] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    rid: str | None = None
    input_ids: list[int] | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    skip_special_tokens: bool = True
    routed_dp_rank: int | None = None
    cache_salt: str | None = None
    priority: int | None = None


@router.get("/v1/models")
async def models_route(request: Request) -> dict[str, Any]:
    """The one model."""
    state = request.app.state
    card = {
        "id": state.name,
        "object": "model",
        "created": state.started,
        "owned_by": "rlcore",
        "root": str(state.engine.path),
        "max_model_len": state.engine.worker.model.context_length,
    }
    return {"object": "list", "data": [card]}


@router.post("/v1/chat/completions")
async def chat_route(body: ChatRequest, request: Request) -> Response:
    """A chat completion; the conversation is encoded so that no content can become a control token."""
    engine: EmbeddedEngine = request.app.state.engine
    name: str = request.app.state.name
    if body.model not in (None, "default", name, str(engine.path)):
        raise WireError(404, f"there is no model {body.model!r} here; this is {name!r}", "model", "model_not_found")
    prompt = body.input_ids if body.input_ids is not None else _render(engine, body)
    room = engine.worker.model.context_length - len(prompt)
    limit = body.max_completion_tokens or body.max_tokens or max(room, 1)
    rid = body.rid or request.headers.get("x-request-id")
    answer = _Answer(engine, body, name, prompt)
    parts = generate(engine, prompt, body, max_tokens=limit, rid=rid, whole=not body.stream)
    if body.stream:
        return await EventStream.open(request, answer.chunks(parts))
    return JSONResponse(await unless_gone(request, answer.whole(parts)))


def _render(engine: EmbeddedEngine, body: ChatRequest) -> list[int]:
    if engine.renderer is None:
        raise WireError(400, "this model has no tokenizer: give input_ids", "messages")
    try:
        return engine.renderer.render([message.to_message() for message in body.messages])
    except ConfigError as error:
        raise WireError(400, str(error), "messages") from error


class _Answer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(self, engine: EmbeddedEngine, body: ChatRequest, name: str, prompt: list[int]) -> None:
        self._engine, self._body, self._prompt = engine, body, prompt
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}

    async def whole(self, parts: AsyncIterator[Part]) -> dict[str, Any]:
        part = [part async for part in parts][-1]
        choice = {"index": 0, "message": {"role": "assistant", "content": part.text}, **self._rest(part, 0)}
        if self._body.return_prompt_token_ids:
            choice["prompt_token_ids"] = self._prompt
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": _usage(part)}

    async def chunks(self, parts: AsyncIterator[Part]) -> AsyncIterator[dict[str, Any]]:
        head = {**self._head, "object": "chat.completion.chunk"}
        opening: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        if self._body.return_prompt_token_ids:
            opening["prompt_token_ids"] = self._prompt
        first, said, count = True, 0, 0
        async for part in parts:
            if first:
                first = False
                yield {**head, "choices": [opening]}
            delta = {"content": part.text[said:]} if len(part.text) > said else {}
            yield {**head, "choices": [{"index": 0, "delta": delta, **self._rest(part, count)}]}
            said, count = len(part.text), len(part.out)
            last = part
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": _usage(last)}

    def _rest(self, part: Part, start: int) -> dict[str, Any]:
        """Everything of a choice but its text, for the ids from ``start`` on."""
        finish = finish_of(part)
        rest: dict[str, Any] = {
            "finish_reason": finish and finish["type"],
            "matched_stop": part.matched,
            "logprobs": None,
        }
        if self._body.logprobs:
            pairs = zip(part.out[start:], part.logprobs[start:], strict=True)
            rest["logprobs"] = {"content": [self._entry(token, logprob) for token, logprob in pairs]}
        if self._body.return_token_ids:
            rest["response_token_ids"] = list(part.out[start:])
        if self._body.return_meta_info and finish:
            logprobs = [[lp, token, None] for lp, token in zip(part.logprobs, part.out, strict=True)]
            rest["meta_info"] = {
                "id": part.id,
                "finish_reason": finish,
                "output_token_logprobs": logprobs,
                "prompt_tokens": part.prompt_tokens,
                "completion_tokens": len(part.out),
                "cached_tokens": part.cached_tokens,
                "min_weight_version": str(part.versions[0]),
                "weight_version": str(part.versions[1]),
            }
        return rest

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        renderer = self._engine.renderer
        text = renderer.tokenizer.decode([token]) if renderer else ""
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _usage(part: Part) -> dict[str, Any]:
    return {
        "prompt_tokens": part.prompt_tokens,
        "completion_tokens": len(part.out),
        "total_tokens": part.prompt_tokens + len(part.out),
        "prompt_tokens_details": {"cached_tokens": part.cached_tokens},
    }
