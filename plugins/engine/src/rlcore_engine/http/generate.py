"""SGLang's ``/generate``: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from rlcore.types import FinishReason

from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.http.sampling import Options, Part, generate
from rlcore_engine.http.wire import EventStream, unless_gone

__all__ = ["finish_of", "router"]

router = APIRouter()


class SamplingParams(Options):
    """SGLang's sampling parameters; those that are not built here are taken with their neutral value alone."""

    max_new_tokens: int = Field(128, ge=1)
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: Literal[1] = 1
    min_p: Literal[0, 0.0] = 0
    min_new_tokens: Literal[0] = 0
    frequency_penalty: Literal[0, 0.0] = 0
    presence_penalty: Literal[0, 0.0] = 0
    repetition_penalty: Literal[1, 1.0] = 1


class GenerateRequest(BaseModel):
    """The body of ``/generate``. Hints for routers and caches are taken and mean nothing here."""

    model_config = ConfigDict(extra="forbid")

    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: Literal[-1] | None = None
    top_logprobs_num: Literal[0] | None = None
    return_text_in_logprobs: Literal[False] | None = None
    stream: bool = False
    session_params: Any = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_routed_experts: Literal[False] | None = None


@router.post("/generate")
async def generate_route(body: GenerateRequest, request: Request) -> Response:
    """One prompt a request, as token ids."""
    engine: EmbeddedEngine = request.app.state.engine
    params = body.sampling_params
    if params.seed is None:
        params = params.model_copy(update={"seed": params.sampling_seed})
    rid = body.rid or request.headers.get("x-request-id")
    parts = generate(engine, body.input_ids, params, max_tokens=params.max_new_tokens, rid=rid, whole=not body.stream)
    answers = _answers(parts, body.return_logprob)
    if body.stream:
        return await EventStream.open(request, answers)
    return JSONResponse(await unless_gone(request, _last(answers)))


async def _answers(parts: AsyncIterator[Part], with_logprobs: bool) -> AsyncIterator[dict[str, Any]]:
    async for part in parts:
        meta: dict[str, Any] = {
            "id": part.id,
            "finish_reason": finish_of(part),
            "prompt_tokens": part.prompt_tokens,
            "completion_tokens": len(part.out),
            "cached_tokens": part.cached_tokens,
            "min_weight_version": str(part.versions[0]),
            "weight_version": str(part.versions[1]),
        }
        if with_logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[lp, i, None] for lp, i in zip(part.logprobs, part.out, strict=True)]
        yield {"text": part.text, "output_ids": list(part.out), "meta_info": meta}


async def _last(answers: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [answer async for answer in answers][-1]


def finish_of(part: Part) -> dict[str, Any] | None:
    """SGLang's word for why it ended."""
    if part.finish is None:
        return None
    if part.finish is FinishReason.STOP:
        return {"type": "stop", "matched": part.matched}
    if part.finish is FinishReason.LENGTH:
        return {"type": "length", "length": len(part.out)}
    return {"type": "abort", "message": "aborted"}
