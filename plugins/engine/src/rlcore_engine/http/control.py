"""What steers and shows the engine: abort, pause, weights, health, figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict
from rlcore.errors import ConfigError, PolicyUnavailable

from rlcore_engine import __version__
from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.http.metrics import exposition
from rlcore_engine.http.wire import WireError

__all__ = ["Staged", "router"]

router = APIRouter()


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AbortRequest(_Body):
    """Which request to end."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None


class PauseRequest(_Body):
    """How to pause; see :meth:`rlcore_engine.engine.EmbeddedEngine.pause`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueRequest(_Body):
    """Go on."""

    torch_empty_cache: bool = False


class UpdateRequest(_Body):
    """What both kinds of update have in common. Prefixes are always forgotten: they were computed with old weights."""

    weight_version: str | int | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: Literal["auto"] | None = None
    torch_empty_cache: bool = False


class DiskUpdate(UpdateRequest):
    """Weights of a folder of safetensors."""

    model_path: str
    keep_pause: bool = False
    is_async: Literal[False] = False
    token_step: int = 0


class TensorUpdate(UpdateRequest):
    """Base64 of a pickled list of (name, tensor); one entry, as there is one worker."""

    serialized_named_tensors: list[str]


class Staged:
    """Tensors of an update that comes in several requests; nothing is loaded before the last is there."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.tensors: dict[str, Any] = {}

    def add(self, version: int, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Everything of ``version`` so far; what is left of another version is dropped."""
        if version != self.version:
            self.version, self.tensors = version, {}
        self.tensors |= dict(tensors)
        return self.tensors

    def clear(self) -> None:
        """Forget all."""
        self.version, self.tensors = None, {}


def _engine(request: Request) -> EmbeddedEngine:
    engine: EmbeddedEngine = request.app.state.engine
    return engine


def _version(raw: str | int | None, engine: EmbeddedEngine) -> int:
    try:
        return engine.version + 1 if raw is None else int(raw)
    except ValueError as error:
        raise WireError(400, f"weight_version {raw!r} is not a number", "weight_version") from error


@router.post("/abort_request")
async def abort_route(body: AbortRequest, request: Request) -> dict[str, Any]:
    """End one request, or all; an unknown id is fine."""
    if not body.abort_all and body.rid is None:
        raise WireError(400, "give rid or abort_all", "rid")
    await _engine(request).abort(None if body.abort_all else body.rid)
    return {}


@router.post("/pause_generation")
async def pause_route(request: Request, body: PauseRequest | None = None) -> dict[str, Any]:
    """Nothing is sampled when this has answered; new requests are held."""
    mode = (body or PauseRequest()).mode
    await _engine(request).pause(mode)
    return {"status": "ok", "message": f"paused ({mode})"}


@router.post("/continue_generation")
async def continue_route(request: Request, body: ContinueRequest | None = None) -> dict[str, Any]:
    """Go on."""
    await _engine(request).resume()
    return {"status": "ok", "message": "generation goes on"}


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_route(request: Request) -> dict[str, Any]:
    """Forget every cached prefix."""
    await _engine(request).flush()
    return {"status": "ok", "message": "cache flushed"}


@router.post("/update_weights_from_disk")
async def disk_route(body: DiskUpdate, request: Request) -> JSONResponse:
    """Load all weights of a folder, between two tokens."""
    from rlcore_engine.models.llama import read_safetensors

    engine = _engine(request)
    if body.abort_all_requests:
        await engine.abort(None)
    if body.keep_pause:
        await engine.pause("in_place")
    try:
        tensors = await asyncio.to_thread(lambda: list(read_safetensors(Path(body.model_path))))
        await engine.update_weights(_version(body.weight_version, engine), tensors)
    except ConfigError as error:
        return _refused(str(error))
    return JSONResponse({"success": True, "message": f"version {engine.version}", "num_paused_requests": 0})


@router.post("/update_weights_from_tensor")
async def tensor_route(body: TensorUpdate, request: Request) -> JSONResponse:
    """Load tensors, between two tokens, when all are there.

    A large model may come in several requests that carry the same ``weight_version``: they are collected, and the version
    changes when the last tensor has arrived. Any error drops what was collected.
    """
    from rlcore_engine.http.unpickle import named_tensors

    engine, staged = _engine(request), request.app.state.staged
    try:
        if len(body.serialized_named_tensors) != 1:
            raise ValueError(f"{len(body.serialized_named_tensors)} parts, but this engine is one worker")
        tensors = await asyncio.to_thread(named_tensors, body.serialized_named_tensors[0])
        version = _version(body.weight_version, engine)
        shapes = engine.worker.model.shapes()
        if body.weight_version is not None and shapes.keys() >= dict(tensors).keys() != shapes.keys():
            tensors = list(staged.add(version, tensors).items())
            if shapes.keys() > dict(tensors).keys():
                return JSONResponse({"success": True, "message": f"{len(tensors)} of {len(shapes)} tensors are here"})
        if body.abort_all_requests:
            await engine.abort(None)
        await engine.update_weights(version, tensors)
    except (ValueError, ConfigError) as error:
        staged.clear()
        return _refused(str(error))
    staged.clear()
    return JSONResponse({"success": True, "message": f"version {engine.version}"})


def _refused(message: str) -> JSONResponse:
    return JSONResponse({"success": False, "message": message}, status_code=400)


@router.get("/health")
async def health_route(request: Request) -> Response:
    """200 while the engine can serve, paused or not."""
    failure = _engine(request).worker.failure
    return PlainTextResponse(f"the engine failed: {failure}", 503) if failure else PlainTextResponse("ok")


@router.get("/health_generate")
async def health_generate_route(request: Request) -> Response:
    """200 if a token can be sampled within 5 seconds."""
    try:
        async with asyncio.timeout(5.0):
            await _engine(request).generate([0], max_tokens=1)
    except (TimeoutError, PolicyUnavailable) as error:
        return PlainTextResponse(f"no token within 5 s: {error}", 503)
    return PlainTextResponse("ok")


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info_route(request: Request) -> dict[str, Any]:
    """Which model and which weights."""
    engine = _engine(request)
    return {
        "model_path": str(engine.path),
        "tokenizer_path": str(engine.path),
        "is_generation": True,
        "weight_version": str(engine.version),
    }


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info_route(request: Request) -> dict[str, Any]:
    """What it is and what it does now."""
    engine = _engine(request)
    active, waiting = engine.worker.load()
    return {
        "version": __version__,
        "model_path": str(engine.path),
        "served_model_name": request.app.state.name,
        "tp_size": 1,
        "dp_size": 1,
        "dtype": str(engine.worker.model.dtype).removeprefix("torch."),
        "context_length": engine.worker.model.context_length,
        "max_running_requests": engine.config.slots,
        "weight_version": str(engine.version),
        "paused": engine.worker.paused,
        "running": active,
        "waiting": waiting,
        "running_rids": sorted(await engine.running()),
    }


@router.get("/metrics")
async def metrics_route(request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(exposition(_engine(request)), media_type="text/plain; version=0.0.4; charset=utf-8")
