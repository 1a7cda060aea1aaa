"""The client of OpenAI-compatible endpoints: messages go verbatim, secrets stay where they belong."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rlcore.errors import ConfigError
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import Session
from rlcore.types import Budget, FinishReason, Message, RunContext, Sampling
from rlcore_policies.chat import OpenAIClient

pytestmark = pytest.mark.anyio


def choice(message: dict[str, Any], finish: Any = "stop") -> dict[str, Any]:
    return {"answer": {"choices": [{"index": 0, "finish_reason": finish, "message": message}]}}


@pytest.mark.fault("MASK-12")
async def test_the_assistants_message_goes_back_as_it_came(connect: Any, server: Any) -> None:
    client = await connect("openai")
    session = Session(
        client, ledger=RequestLedger(), session_id="s", sampling=Sampling(), budget=Budget(50, 1000, 5, 30)
    )
    reply = await session.ask([Message("system", "be brief"), Message("user", "go", {"name": "n"})])
    assert reply.text == "ls \n"
    await session.ask([Message("user", "done")])
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go", "name": "n"},
        {"role": "assistant", "content": "ls \n", "reasoning_content": "hm"},
        {"role": "user", "content": "done"},
    ]
    assert session.left.tokens == 1000 - 12
    assert session.turns[0].completion.completion_tokens == 3
    assert session.turns[0].prompt_ids == ()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "odd"]}, "ab"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "x"),
    ],
)
async def test_contents_of_every_shape(
    connect: Any, server: Any, request_of: Any, message: dict[str, Any], text: str
) -> None:
    client = await connect("openai")
    server.behave = lambda body: choice(message)
    done = await client.complete(request_of())
    assert (done.text, done.message.content, done.message.role) == (text, text, "assistant")
    assert done.message.extra.get("tool_calls") == message.get("tool_calls")


@pytest.mark.fault("MASK-09")
@pytest.mark.parametrize(
    ("raw", "finish"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("tool_calls", FinishReason.TOOL_CALLS),
        ("function_call", FinishReason.TOOL_CALLS),
        ("abort", FinishReason.ABORT),
        ("content_filter", FinishReason.UNKNOWN),
        (None, FinishReason.UNKNOWN),
        (5, FinishReason.UNKNOWN),
    ],
)
async def test_how_it_ended(connect: Any, server: Any, request_of: Any, raw: Any, finish: FinishReason) -> None:
    client = await connect("openai")
    server.behave = lambda body: choice({"content": "x"}, raw)
    assert (await client.complete(request_of())).finish_reason is finish


async def test_sampling_and_more_keys_are_sent(connect: Any, server: Any, request_of: Any) -> None:
    sampling = Sampling(0.7, 0.9, 40, seed=2**40 + 1)
    client = await connect("openai", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    await client.complete(request_of(sampling=sampling))
    wanted = {"max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 1, "model": "toy"}
    assert wanted.items() <= server.bodies[0].items()
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    client = await connect("openai", max_tokens_field="max_completion_tokens", send_sampling=False)
    await client.complete(request_of(sampling=sampling))
    assert server.bodies[1].keys() == {"max_completion_tokens", "model", "messages"}


async def test_the_model_is_the_servers_only_one(connect: Any, server: Any, request_of: Any) -> None:
    client = await connect("openai", model=None)
    await client.complete(request_of())
    assert server.bodies[0]["model"] == "toy"
    server.models = ["a", "b"]
    with pytest.raises(ConfigError, match=r"policy\.model: name one of the models of .*\['a', 'b'\]"):
        await connect("openai", model=None)


async def test_a_key_is_read_where_it_is_and_goes_to_its_own_server_only(
    connect: Any, server: Any, request_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-vendor")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    client = await connect("openai")
    await client.complete(request_of())
    assert server.headers[0]["authorization"] == "Bearer none"
    (tmp_path / "key").write_text("sesame\n")
    client = await connect("openai", api_key={"file": str(tmp_path / "key")})
    await client.complete(request_of())
    assert server.headers[1]["authorization"] == "Bearer sesame"
    with pytest.raises(ConfigError, match="environment variable MISSING_KEY"):
        await connect("openai", api_key={"env": "MISSING_KEY"})
    with pytest.raises(ValidationError, match="a secret is not written down"):
        OpenAIClient.Config(api_key="sk-123")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="set OPENAI_API_KEY"):
        await OpenAIClient(OpenAIClient.Config(model="m")).start(RunContext("run", tmp_path, 0, {}))
