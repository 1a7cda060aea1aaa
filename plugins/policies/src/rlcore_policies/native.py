"""A token-exact client of SGLang's native interface: ids in, ids and log-probs out."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from rlcore.config import Secret
from rlcore.errors import ConfigError, InfraError, PolicyUnavailable, Throttled
from rlcore.protocols import Renderer
from rlcore.types import Completion, FinishReason, ModelRequest, RunContext

from rlcore_policies._answers import BaseUrl, excerpt, finish_reason, header, json_object, refuse
from rlcore_policies._calls import Calls
from rlcore_policies.routing import Router

if TYPE_CHECKING:
    import httpx

__all__ = ["SGLangClient"]

log = logging.getLogger(__name__)

CONTROL_SECONDS = 3.0
"""Bound of an abort, its proof included: a cancelled attempt must end within 5 s."""
AGAIN_SECONDS = 0.25
"""An abort that came before the engine had scheduled its request is sent again after this."""


class SGLangClient:
    """Implements :class:`rlcore.protocols.PolicyClient` over ``/generate``.

    A session stays with one engine, the one that had the fewest. A request that is cancelled or out of time is aborted
    by its id, again until its answer comes, and only then its connection is closed.
    """

    class Config(BaseModel):
        """Options of the policy client ``sglang``."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        base_urls: tuple[BaseUrl, ...] = Field((), description="engines or a router; default: the run's own engine")
        worker_urls: tuple[BaseUrl, ...] = Field(
            (), description="engines behind a router, which passes no aborts on; default: base_urls"
        )
        tokenizer: str | None = Field(None, description="folder of tokenizer and chat template; default: model.path")
        template_options: dict[str, Any] = Field(
            default_factory=dict, description="variables of the chat template, such as enable_thinking"
        )
        api_key: Secret | None = Field(None, description="{env = NAME} or {file = PATH}, where the engine wants a key")
        extra_body: dict[str, Any] = Field(default_factory=dict, description="more keys for the body of /generate")
        sampling_params: dict[str, Any] = Field(
            default_factory=dict, description="more sampling parameters, such as stop_token_ids"
        )
        send_seed: bool = Field(False, description="send sampling_seed; engines that do not know it refuse the request")
        connect_seconds: float = Field(10.0, gt=0, description="time to connect to an engine")
        rest_seconds: float = Field(30.0, ge=0, description="how long an engine that does not answer gets nothing")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._http: httpx.AsyncClient | None = None
        self._renderer: Renderer | None = None
        self._stops: list[int] = []
        self._workers: tuple[str, ...] = ()
        self._router = Router((), rest_seconds=config.rest_seconds)
        self._calls = Calls(self._end)
        self._engine_of: dict[str, str] = {}
        self._window: int | None = None

    async def start(self, context: RunContext) -> None:
        """Load the tokenizer and open the connections.

        Raises:
            ConfigError: no URL, or no usable tokenizer.
        """
        import httpx

        from rlcore_policies.tokenizer import load_renderer

        urls = self._config.base_urls
        if not urls:
            own = getattr(context.engine, "url", None)
            if not isinstance(own, str):
                raise ConfigError("policy.base_urls: name an engine: this run's own serves no HTTP")
            urls = (own.rstrip("/"),)
        folder = self._config.tokenizer or context.model.get("path")
        if not folder:
            raise ConfigError("policy.tokenizer: name the folder of the model's tokenizer (or set model.path)")
        renderer = await asyncio.to_thread(load_renderer, folder, **self._config.template_options)
        self._renderer, self._stops = renderer, sorted(renderer.end_ids)
        self._workers = self._config.worker_urls or urls
        self._router = Router(urls, rest_seconds=self._config.rest_seconds)
        key = self._config.api_key
        self._http = httpx.AsyncClient(
            trust_env=False,
            headers={} if key is None else {"Authorization": f"Bearer {key.read()}"},
            # a connection that the server closes while it is used again loses a request that may not be sent twice, and
            # a new one costs nothing beside a generation: every request gets its own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(CONTROL_SECONDS, connect=self._config.connect_seconds),
        )
        windows = [w for w in await asyncio.gather(*map(self._window_of, urls)) if w is not None]
        self._window = min(windows, default=None)

    @property
    def context_length(self) -> int | None:
        """The shortest window of the engines, as far as they said at the start."""
        return self._window

    @property
    def renderer(self) -> Renderer | None:
        """The model's renderer; there after :meth:`start`."""
        return self._renderer

    async def complete(self, request: ModelRequest) -> Completion:
        """One generation, sent once."""
        engine = self._router.route(request.session_id)
        self._engine_of[request.id] = engine
        try:
            return await self._calls.run(request.id, self._generate(engine, request), request.seconds)
        finally:
            del self._engine_of[request.id]

    async def abort(self, request_id: str) -> None:
        """End a request on the engine that has it; on every engine if that is not known."""
        engine = self._engine_of.get(request_id)
        targets = (engine,) if engine in self._workers else self._workers
        await asyncio.gather(*(self._abort_at(target, request_id) for target in targets))

    async def running(self) -> frozenset[str] | None:
        """The ids that all engines work on, where they list them in ``/server_info`` (``running_rids``)."""
        found: set[str] = set()
        for worker in self._workers:
            try:
                ids = (await self._control("GET", worker, "/server_info")).get("running_rids")
            except InfraError:
                return None
            if not isinstance(ids, list):
                return None
            found.update(map(str, ids))
        return frozenset(found)

    def release(self, session_id: str) -> None:
        """A session ended: its engine has room for another."""
        self._router.release(session_id)

    async def aclose(self) -> None:
        """Abort what is open and close the connections."""
        await self._calls.close()
        if self._http is not None:
            await self._http.aclose()

    async def _generate(self, engine: str, request: ModelRequest) -> Completion:
        where = f"{engine}/generate"
        answer = await self._post(engine, where, request)
        self._router.answered(engine)
        return _completion(answer, where)

    async def _post(self, engine: str, where: str, request: ModelRequest) -> dict[str, Any]:
        import httpx

        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": self._stops,
            "skip_special_tokens": False,
        }
        if self._config.send_seed and sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed % 2**31
        body = {
            "rid": request.id,
            "input_ids": list(request.prompt_ids or ()),
            "sampling_params": {**parameters, **self._config.sampling_params},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
            **self._config.extra_body,
        }
        try:
            response = await self._connected().post(
                where,
                content=json.dumps(body),
                headers={
                    "Content-Type": "application/json",
                    "X-SMG-Routing-Key": header(request.session_id),
                    "X-Request-Id": header(request.id),
                },
                timeout=httpx.Timeout(request.seconds, connect=min(self._config.connect_seconds, request.seconds)),
            )
        except httpx.TransportError as error:
            self._router.failed(engine)
            raise PolicyUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            refuse(response.status_code, response.headers, response.content, where)
        return json_object(response.content, where)

    async def _end(self, request_id: str, task: asyncio.Task[Any]) -> None:
        """Abort until the answer comes: an engine that has not scheduled a request yet misses the first abort."""
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                while not task.done():
                    await self.abort(request_id)
                    await asyncio.wait({task}, timeout=AGAIN_SECONDS)
        except TimeoutError:
            # the closed connection, which follows, is the other way to say it; the ledger's sweep finds the rest
            if (engine := self._engine_of.get(request_id)) is not None:
                self._router.failed(engine)

    async def _window_of(self, engine: str) -> int | None:
        try:
            models = (await self._control("GET", engine, "/v1/models")).get("data")
        except InfraError as error:
            log.warning("the context length is not known: %s", error)
            return None
        model = models[0] if isinstance(models, list) and models else None
        return _count(model.get("max_model_len")) or None if isinstance(model, dict) else None

    async def _abort_at(self, worker: str, request_id: str) -> None:
        try:
            await self._control("POST", worker, "/abort_request", {"rid": request_id})
        except InfraError as error:
            log.warning("request %s could not be aborted: %s", request_id, error)

    async def _control(
        self, method: str, worker: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        import httpx

        where = f"{worker}{path}"
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                response = await self._connected().request(method, where, json=body)
        except (httpx.TransportError, TimeoutError) as error:
            raise PolicyUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            refuse(response.status_code, response.headers, response.content, where)
        return json_object(response.content, where) if response.content.strip().startswith(b"{") else {}

    def _connected(self) -> httpx.AsyncClient:
        if self._http is None:
            raise PolicyUnavailable("the client was not started")
        return self._http


def _completion(answer: Mapping[str, Any], where: str) -> Completion:
    """The answer's ids and log-probs, as they are: the session says whether they can be trained."""
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise PolicyUnavailable(f"{where}: an answer without meta_info: {excerpt(str(dict(answer)))}")
    finish = meta.get("finish_reason")
    finish = finish if isinstance(finish, dict) else {"type": finish}
    reason = finish_reason(finish.get("type"))
    if reason is FinishReason.ABORT and "queue is full" in str(finish.get("message")):
        raise Throttled(f"{where}: {excerpt(str(finish['message']))}")
    entries = meta.get("output_token_logprobs") or []
    measured = [entry for entry in entries if isinstance(entry, list | tuple) and len(entry) >= 2]
    ids = answer.get("output_ids")
    if not isinstance(ids, list):
        ids = [entry[1] for entry in measured]
    logprobs = [_number(entry[0]) for entry in measured]
    if reason is not FinishReason.ABORT and len(measured) == len(ids) and [entry[1] for entry in measured] != ids:
        raise PolicyUnavailable(f"{where}: the log-probs are of other tokens than output_ids")
    version = _version(meta.get("weight_version"), where)
    oldest = meta.get("min_weight_version")
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish_reason=reason,
        policy_version=version,
        min_policy_version=None if oldest is None else _version(oldest, where),
        prompt_tokens=_count(meta.get("prompt_tokens")),
        completion_tokens=_count(meta.get("completion_tokens")),
    )


def _number(value: object) -> float:
    """A log-prob; what is none becomes NaN, which the session refuses."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _version(raw: object, where: str) -> int:
    """The policy version; an engine that was never given one says ``default`` and counts as 0."""
    if raw in (None, "default"):
        return 0
    try:
        return int(str(raw))
    except ValueError:
        raise PolicyUnavailable(f"{where}: weight_version {raw!r} is no policy version") from None


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
