"""What both generation routes have in common: how a request samples, and where its text ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.errors import PolicyUnavailable, Throttled
from rlcore.types import FinishReason, Sampling

from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.http.wire import WireError

__all__ = ["Options", "Part", "generate"]


class Options(BaseModel):
    """Parameters of sampling by the names that both routes use; what is not here is refused."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """Texts that end a generation."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]


@dataclass(slots=True)
class Part:
    """A generation so far.

    Attributes:
        id: the request's id.
        text: decoded without the stop marker and what is behind a stop text; only grows.
        out: ``[T]`` ids; logprobs: ``[T]``.
        finish: ``None`` while it goes on.
        matched: stop id or stop text that ended it.
    """

    id: str
    text: str
    out: Sequence[int]
    logprobs: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    versions: tuple[int, int]
    finish: FinishReason | None
    matched: int | str | None


async def generate(
    engine: EmbeddedEngine, prompt: Sequence[int], options: Options, *, max_tokens: int, rid: str | None, whole: bool
) -> AsyncIterator[Part]:
    """Parts of a generation; with ``whole`` only the last.

    Raises:
        WireError: 400 for a bad prompt or an id in use, 429 for a full queue, 503 for an engine that does not serve.
    """
    if len(prompt) >= engine.worker.model.context_length:
        limit = engine.worker.model.context_length
        raise WireError(
            400, f"the prompt has {len(prompt)} tokens; the model takes {limit}", None, "context_length_exceeded"
        )
    if rid is not None and rid in await engine.running():
        raise WireError(400, f"a request with the id {rid!r} is running", "rid")
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampling": Sampling(options.temperature, options.top_p, options.top_k or -1, options.seed),
        "request_id": rid,
        "stop_ids": options.stop_token_ids or (),
        "ignore_stops": options.ignore_eos,
    }
    stops = options.stops
    try:
        async with aclosing(engine.stream(prompt, **fields)) as requests:  # type: ignore[type-var]
            async for request in requests:
                finish, matched = request.finish, request.matched
                count = min(len(request.out), len(request.logprobs))
                if whole and not stops and finish is None:
                    continue
                text, found = _text(engine, request.out[:count], stops, final=finish is not None)
                if found is not None:
                    finish, matched = FinishReason.STOP, found
                yield Part(
                    request.id,
                    text,
                    request.out[:count],
                    request.logprobs[:count],
                    len(request.prompt),
                    request.cached,
                    request.versions or (engine.version, engine.version),
                    finish,
                    matched,
                )
                if finish is not None:
                    return
    except Throttled as error:
        raise WireError(429, str(error)) from error
    except PolicyUnavailable as error:
        raise WireError(503 if engine.worker.failure else 400, str(error)) from error


def _text(engine: EmbeddedEngine, out: Sequence[int], stops: Sequence[str], *, final: bool) -> tuple[str, str | None]:
    """Text so far and the stop text found in it; half a character, or what may become a stop text, waits."""
    if engine.renderer is None:
        return "", None
    text = engine.renderer.decode(out)
    hits = [(text.index(stop), stop) for stop in stops if stop in text]
    if hits:
        at, stop = min(hits)
        return text[:at], stop
    if not final:
        text = text.rstrip("\ufffd")
        held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        text = text[: len(text) - held]
    return text, None
