"""SGLang's native interface: ids and log-probs come through exactly, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rlcore.errors import ConfigError, PolicyUnavailable, Throttled
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import BudgetExhausted, Session
from rlcore.types import Budget, FinishReason, Message, RunContext, Sampling
from rlcore_policies.native import SGLangClient

pytestmark = pytest.mark.anyio


def session_of(client: Any, ledger: RequestLedger | None = None) -> Session:
    return Session(
        client,
        ledger=ledger or RequestLedger(),
        session_id="s",
        sampling=Sampling(0.8, 0.9, 40, seed=5),
        budget=Budget(50, 10_000, 10, 30),
    )


def answer(entries: Any, **meta: Any) -> dict[str, Any]:
    ids = [entry[1] for entry in entries or []]
    return {"answer": {"output_ids": ids, "meta_info": {"output_token_logprobs": entries, **meta}}}


@pytest.mark.fault("MASK-01")
async def test_ids_go_out_and_come_back(connect: Any, server: Any) -> None:
    client = await connect("sglang", send_seed=True)
    end = client.renderer.tokenizer.controls["<|im_end|>"]
    server.behave = lambda body: answer([[-0.1234567891, 70, None], [-7.77, end, "x"]])
    session = session_of(client)
    await session.ask([Message("user", "one")])
    await session.ask([Message("user", "two")])
    first, second = server.bodies
    turn = session.turns[0]
    assert first["input_ids"] == client.renderer.render([Message("user", "one")]) == list(turn.prompt_ids)
    assert second["input_ids"][: len(first["input_ids"]) + 2] == [*first["input_ids"], 70, end]
    assert turn.completion.token_ids == (70, end)
    assert turn.completion.logprobs == (-0.1234567891, -7.77)
    assert turn.completion.policy_version == 3
    assert (first["return_logprob"], first["stream"]) == (True, False)
    sampling = first["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["max_new_tokens"]) == (
        0.8,
        0.9,
        40,
        50,
    )
    assert end in sampling["stop_token_ids"]
    assert sampling["sampling_seed"] != second["sampling_params"]["sampling_seed"]
    assert first["rid"] != second["rid"]


@pytest.mark.fault("MASK-17")
@pytest.mark.parametrize("literal", ["NaN", "-Infinity", "Infinity", "null", "-9999.0", "0.5", '"-1"', "true"])
async def test_a_log_prob_that_is_none_is_no_turn(connect: Any, server: Any, literal: str) -> None:
    client = await connect("sglang")

    def behave(body: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(
            {
                "output_ids": [5, 6],
                "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 5], ["?", 6]]},
            }
        )
        return {"body": text.replace('"?"', literal).encode()}

    server.behave = behave
    ledger = RequestLedger()
    session = session_of(client, ledger)
    with pytest.raises(PolicyUnavailable, match="session s, turn 0: the log-prob of token 1 is"):
        await session.ask([Message("user", "x")])
    assert not session.turns
    assert ledger.metrics()["failed_requests"] == 1


@pytest.mark.fault("MASK-07")
@pytest.mark.parametrize(
    "change",
    [
        {"meta_info": {"output_token_logprobs": None}},
        {"meta_info": {"output_token_logprobs": []}},
        {"meta_info": {"output_token_logprobs": [[-0.1, 11, None]]}},
        {"meta_info": {"output_token_logprobs": [[-0.1], [-0.1], [-0.1]]}},
        {"meta_info": {"output_token_logprobs": [[-0.1, 11, None], [-0.1, 12, None], [-0.1, 99, None]]}},
        {"output_ids": []},
        {"output_ids": [11, 12, 13, 14]},
        {"meta_info": {"prompt_tokens": 1}},
    ],
    ids=str,
)
async def test_ids_and_log_probs_that_do_not_belong_together_are_no_turn(
    connect: Any, server: Any, change: dict[str, Any]
) -> None:
    client = await connect("sglang")
    server.behave = lambda body: {"answer": change}
    session = session_of(client)
    with pytest.raises(PolicyUnavailable, match="turn 0"):
        await session.ask([Message("user", "x")])
    assert not session.turns


@pytest.mark.fault("CLI-06")
@pytest.mark.parametrize(
    "finish", [{"type": "abort", "message": "aborted"}, {"type": "abort"}, None, "abort", {"type": "odd"}]
)
async def test_an_abort_without_its_metadata_is_an_abort(connect: Any, server: Any, finish: Any) -> None:
    client = await connect("sglang")
    server.version = None
    body = {"output_ids": [1, 2, 3], "meta_info": {"finish_reason": finish}}
    server.behave = lambda _: {"body": json.dumps(body).encode()}
    ledger = RequestLedger()
    session = session_of(client, ledger)
    with pytest.raises(PolicyUnavailable, match="turn 0"):
        await session.ask([Message("user", "x")])
    assert not session.turns
    counted = ledger.metrics()
    assert counted["aborted_requests"] + counted["failed_requests"] == 1
    assert counted["wasted_tokens"] == 3


@pytest.mark.fault("MASK-09")
@pytest.mark.parametrize(("finish", "expected"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)])
async def test_how_it_ended(connect: Any, server: Any, request_of: Any, finish: str, expected: FinishReason) -> None:
    client = await connect("sglang")
    server.behave = lambda body: {"answer": {"meta_info": {"finish_reason": {"type": finish}}}}
    assert (await client.complete(request_of())).finish_reason is expected


async def test_versions(connect: Any, server: Any, request_of: Any) -> None:
    client = await connect("sglang")
    for raw, version in (("default", 0), ("12", 12), (None, 0), (7, 7)):
        server.version = raw
        assert (await client.complete(request_of())).policy_version == version
    server.behave = lambda body: {"answer": {"meta_info": {"weight_version": "12", "min_weight_version": "11"}}}
    done = await client.complete(request_of())
    assert (done.min_policy_version, done.policy_version) == (11, 12)
    server.behave = lambda body: {"answer": {"meta_info": {"weight_version": "main"}}}
    with pytest.raises(PolicyUnavailable, match="weight_version 'main'"):
        await client.complete(request_of())


@pytest.mark.fault("CLI-05")
async def test_a_session_never_goes_past_the_models_window(connect: Any, server: Any, serving: Any) -> None:
    server.window = 40
    async with serving() as other:
        for urls, window in (([other.url], None), ([server.url, other.url, "http://127.0.0.1:9"], 40)):
            client = await connect("sglang", urls)
            assert client.context_length == window
    session = session_of(await connect("sglang"))
    assert session.left.tokens == 40
    await session.ask([Message("user", "x")])
    assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 40 - len(server.bodies[0]["input_ids"])
    with pytest.raises(BudgetExhausted):
        await session.ask([Message("user", "y" * 100)])
    assert len(server.bodies) == 1


async def test_a_full_queue_throttles(connect: Any, server: Any, request_of: Any) -> None:
    client = await connect("sglang")
    finish = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    server.behave = lambda body: {"answer": {"meta_info": {"finish_reason": finish}}}
    with pytest.raises(Throttled):
        await client.complete(request_of())


async def test_aborts_go_past_a_router_to_every_worker(connect: Any, serving: Any, request_of: Any) -> None:
    async with serving() as router, serving() as a, serving() as b:
        client = await connect("sglang", router.url, worker_urls=[a.url, b.url])
        await client.abort("r1")
        assert (router.aborts, a.aborts, b.aborts) == ([], ["r1"], ["r1"])


async def test_an_engine_that_cannot_say_what_it_does(connect: Any, server: Any, raw_server: Any) -> None:
    client = await connect("sglang", [server.url, "http://127.0.0.1:9"])
    assert await client.running() is None
    await client.abort("unknown")
    assert await (await connect("sglang")).running() == frozenset()


async def test_keys_and_more_options_reach_the_engine(
    connect: Any, server: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sesame")
    client = await connect(
        "sglang",
        api_key={"env": "ENGINE_KEY"},
        extra_body={"priority": 1},
        sampling_params={"min_p": 0.1},
    )
    await client.complete(request_of())
    assert server.headers[0]["authorization"] == "Bearer sesame"
    assert server.bodies[0]["priority"] == 1
    assert server.bodies[0]["sampling_params"]["min_p"] == 0.1
    assert "sampling_seed" not in server.bodies[0]["sampling_params"]
    assert "sesame" not in repr(client._config)


async def test_what_is_missing_is_said(tmp_path: Path, toy_folder: Path) -> None:
    context = RunContext("run", tmp_path, 0, {})
    with pytest.raises(ConfigError, match=r"policy\.base_urls: name an engine"):
        await SGLangClient(SGLangClient.Config()).start(context)
    with pytest.raises(ConfigError, match=r"policy\.tokenizer"):
        await SGLangClient(SGLangClient.Config(base_urls=["http://127.0.0.1:1"])).start(context)
    client = SGLangClient(SGLangClient.Config(base_urls=["http://127.0.0.1:1/"]))
    await client.start(RunContext("run", tmp_path, 0, {"path": str(toy_folder)}))
    assert client.renderer is not None
    await client.aclose()
    unstarted = SGLangClient(SGLangClient.Config(base_urls=["http://127.0.0.1:1/"]))
    with pytest.raises(PolicyUnavailable):
        await unstarted.abort("x") or await unstarted._control("GET", "http://127.0.0.1:1", "/x")


@pytest.mark.fault("CLI-08")
@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://", "http://::1:30000", "ftp://x", "http://[::1", ""])
def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(ValidationError, match=r"is not a URL such as"):
        SGLangClient.Config(base_urls=[url])
