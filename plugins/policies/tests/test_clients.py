"""Both clients against a real server on loopback: nothing is sent twice, nothing goes on for nobody, nothing hangs."""

import asyncio
import gzip
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from rlcore.errors import PolicyUnavailable, Throttled
from rlcore.protocols import PolicyClient
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import Session
from rlcore.types import Budget, FinishReason, Message, Sampling

pytestmark = pytest.mark.anyio
KINDS = pytest.mark.parametrize("kind", ["openai", "sglang"])


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Wait for a condition and say how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it never came true"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


@KINDS
async def test_a_client_is_what_the_core_wants(connect: Any, kind: str, request_of: Any) -> None:
    client = await connect(kind)
    assert isinstance(client, PolicyClient)
    done = await client.complete(request_of())
    assert done.finish_reason is FinishReason.STOP
    await client.aclose()
    await client.aclose()


@KINDS
@pytest.mark.fault("CLI-03")
async def test_a_request_whose_answer_is_lost_is_not_sent_again(
    connect: Any, server: Any, kind: str, request_of: Any
) -> None:
    client = await connect(kind)
    server.behave = lambda body: {"drop": True}
    with pytest.raises(PolicyUnavailable):
        await client.complete(request_of())
    for status in (500, 502, 503, 504, 408, 409):
        server.behave = lambda body, status=status: {"status": status, "body": b"no"}
        with pytest.raises(PolicyUnavailable, match=f"status {status}: no"):
            await client.complete(request_of(session=f"s{status}"))
    assert len(server.bodies) == 7


@KINDS
@pytest.mark.fault("CLI-01")
async def test_cancelled_requests_end_at_the_server(connect: Any, server: Any, kind: str, request_of: Any) -> None:
    client = await connect(kind)
    server.behave = lambda body: {"seconds": 60}
    tasks = [asyncio.create_task(client.complete(request_of(f"r{n}"))) for n in range(8)]
    await until(lambda: server.live == 8)
    tasks[0].cancel()
    await asyncio.wait({tasks[0]}, timeout=5)
    assert tasks[0].cancelled()
    await until(lambda: server.live == 7, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=5)
    assert await until(lambda: server.live == 0, 2) < 2
    assert server.finished == 0
    if kind == "sglang":
        assert set(server.aborts) == {f"r{n}" for n in range(8)}
        assert await client.running() == frozenset()


@KINDS
@pytest.mark.fault("CLI-01")
async def test_a_request_out_of_time_ends_at_the_server(connect: Any, server: Any, kind: str, request_of: Any) -> None:
    client = await connect(kind)
    server.behave = lambda body: {"seconds": 60}
    started = time.monotonic()
    with pytest.raises(PolicyUnavailable, match=r"no answer within 0\.2 s"):
        await client.complete(request_of("late", seconds=0.2))
    assert time.monotonic() - started < 3
    await until(lambda: server.live == 0, 2)
    assert server.aborts == (["late"] if kind == "sglang" else [])


@KINDS
@pytest.mark.fault("CLI-01")
async def test_closing_a_client_ends_its_requests(connect: Any, server: Any, kind: str, request_of: Any) -> None:
    client = await connect(kind)
    server.behave = lambda body: {"seconds": 60}
    tasks = [asyncio.create_task(client.complete(request_of())) for _ in range(3)]
    await until(lambda: server.live == 3)
    await client.aclose()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, PolicyUnavailable) or r.finish_reason is FinishReason.ABORT for r in results), results
    await until(lambda: server.live == 0, 2)


@KINDS
@pytest.mark.fault("LOOP-14")
async def test_a_second_cancellation_ends_the_caller_and_the_request(
    connect: Any, server: Any, kind: str, request_of: Any
) -> None:
    client = await connect(kind)
    server.behave = lambda body: {"seconds": 60, "late": 0.6}
    task = asyncio.create_task(client.complete(request_of()))
    await until(lambda: server.live == 1)
    task.cancel()
    await asyncio.sleep(0.05)
    task.cancel()
    started = time.monotonic()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert time.monotonic() - started < 0.5, "it does not wait for the abort"
    await until(lambda: server.live == 0, 4)


@pytest.mark.fault("CLI-13")
async def test_an_abort_that_comes_too_early_is_sent_again(connect: Any, server: Any, request_of: Any) -> None:
    client = await connect("sglang")
    server.behave = lambda body: {"seconds": 60, "late": 0.4}
    task = asyncio.create_task(client.complete(request_of("r")))
    await until(lambda: server.live == 1)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert len(server.aborts) > 1
    assert server.live == 0, "proven: its answer came before the caller went on"


@KINDS
@pytest.mark.fault("CLI-10")
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"status": 500, "body": b'{"error": {"message": "out of memory"}}'}, "status 500: out of memory"),
        ({"status": 400, "body": b'{"object": "error", "message": "too long"}'}, "status 400: too long"),
        ({"status": 401, "body": b'{"detail": "no key"}'}, "status 401: no key"),
        ({"status": 302, "body": b"", "headers": {"location": "/elsewhere"}}, "status 302"),
        ({"body": b'{"object": "error", "message": "bad request"}'}, "an error with status 200: bad request"),
        ({"body": b'{"error": "boom"}'}, "an error with status 200: boom"),
        ({"body": b'{"error": {"message": "no model"}}'}, "an error with status 200: no model"),
        ({"body": b"<html>" + b"x" * 5000, "headers": {"content-type": "text/html"}}, r"not JSON: <html>x{194}…"),
        ({"body": b"<html>hi", "headers": {"content-type": "application/json"}}, "not JSON: <html>hi"),
        ({"body": b""}, r"not JSON: \(empty\)"),
        ({"body": b"[]"}, "not a JSON object"),
        ({"body": b"{}"}, "without (a message|meta_info)"),
        ({"body": b'{"choices": [], "meta_info": null}'}, "without (a message|meta_info)"),
        ({"body": b'{"choices": [{"message": null}], "meta_info": []}'}, "without (a message|meta_info)"),
        ({"body": b'{"choices": "x", "meta_info": "x"}'}, "without (a message|meta_info)"),
        ({"body": b'\xff\xfe{"a": 1'}, "not JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_an_error_is_never_an_answer(
    connect: Any, server: Any, kind: str, request_of: Any, behaviour: dict[str, Any], words: str
) -> None:
    if behaviour.get("status") == 302:
        behaviour = {**behaviour, "headers": {"location": f"{server.url}/server_info"}}
    client = await connect(kind)
    server.behave = lambda body: behaviour
    with pytest.raises(PolicyUnavailable, match=words) as caught:
        await client.complete(request_of())
    assert server.url in str(caught.value)
    assert len(str(caught.value)) < 400


@KINDS
@pytest.mark.parametrize(
    ("behaviour", "wait"),
    [
        ({"status": 429, "body": b'{"error": {"message": "quota exceeded"}}', "headers": {"retry-after": "7"}}, 7.0),
        ({"status": 429, "body": b""}, None),
        ({"status": 429, "headers": {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}}, None),
        ({"status": 503, "body": b"busy", "headers": {"retry-after": "1.5"}}, 1.5),
        ({"status": 503, "body": b'{"error": {"message": "The request queue is full."}}'}, None),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_server_that_refuses_throttles(
    connect: Any, server: Any, kind: str, request_of: Any, behaviour: dict[str, Any], wait: float | None
) -> None:
    client = await connect(kind)
    server.behave = lambda body: behaviour
    with pytest.raises(Throttled) as caught:
        await client.complete(request_of())
    assert caught.value.retry_after == wait
    assert len(server.bodies) == 1


@KINDS
@pytest.mark.fault("CLI-19")
@pytest.mark.parametrize("manner", ["silent", "headers", "drip", "drip headers", "half a body"])
async def test_a_server_that_stalls_is_left_in_time(
    connect: Any, raw_server: Any, kind: str, request_of: Any, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore_policies.native.CONTROL_SECONDS", 0.5)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    drips = {"drip": (head, b" " * 60), "drip headers": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 60)}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if manner in drips:
            start, rest = drips[manner]
            writer.write(start)
            for byte in rest:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)
        elif manner != "silent":
            writer.write(head + (b'{"half": ' if manner == "half a body" else b""))
            await writer.drain()
        await asyncio.sleep(60)

    client = await connect(kind, await raw_server(talk))
    started = time.monotonic()
    with pytest.raises(PolicyUnavailable):
        await client.complete(request_of(seconds=0.5))
    assert time.monotonic() - started < 0.5 + 0.5 + 1.5


@KINDS
@pytest.mark.fault("CLI-19")
async def test_nobody_there_is_an_error_at_once(connect: Any, raw_server: Any, kind: str, request_of: Any) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    for url in ("http://127.0.0.1:9", await raw_server(hang_up)):
        client = await connect(kind, url)
        with pytest.raises(PolicyUnavailable):
            await client.complete(request_of(seconds=5))


@KINDS
@pytest.mark.fault("CLI-08")
async def test_proxies_of_the_environment_are_not_used(
    connect: Any, server: Any, kind: str, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    client = await connect(kind)
    await client.complete(request_of())
    assert len(server.bodies) == 1


@KINDS
@pytest.mark.fault("CLI-08")
async def test_ipv6(connect: Any, serving: Any, kind: str, request_of: Any) -> None:
    async with serving("::1") as server:
        assert server.url.startswith("http://[::1]:")
        client = await connect(kind, server.url)
        await client.complete(request_of())
        assert len(server.bodies) == 1


@KINDS
@pytest.mark.fault("CLI-07")
async def test_300_requests_run_at_once(connect: Any, server: Any, kind: str, request_of: Any) -> None:
    client = await connect(kind)
    server.behave = lambda body: {"seconds": 60}
    tasks = [asyncio.create_task(client.complete(request_of(seconds=60))) for _ in range(300)]
    await until(lambda: server.live == 300, 30)
    assert server.peak == 300
    server.behave = lambda body: {}
    await client.complete(request_of())
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: server.live == 0, 10)


@KINDS
@pytest.mark.fault("CLI-07")
async def test_no_request_is_lost_with_a_connection_that_the_server_gave_up(
    connect: Any, raw_server: Any, kind: str, request_of: Any
) -> None:
    good = {
        "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}],
        "output_ids": [1],
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 1, None]]},
    }
    body = json.dumps(good).encode()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("post"):
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        start = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(start.encode() + body)  # it says nothing of closing, and hangs up at the next request
        await reader.read(1)
        writer.transport.abort()

    client = await connect(kind, await raw_server(talk))
    for _ in range(3):
        assert (await client.complete(request_of())).finish_reason is FinishReason.STOP


@KINDS
@pytest.mark.fault("CLI-09")
async def test_a_proxys_odd_answer_is_read_whole(connect: Any, raw_server: Any, kind: str, request_of: Any) -> None:
    long = "é😀" * 40_000
    good = {
        "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": long}}],
        "output_ids": [1],
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 1, long]], "id": "x"},
    }
    body = gzip.compress(json.dumps(good, ensure_ascii=False).encode())

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            return  # asked what models it has
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        await reader.readexactly(length)
        writer.write(
            b"HTTP/1.1 200 OK\r\nDate: Mon\r\nDate: Tue\r\nServer: a\r\nServer: b\r\nContent-Type: application/json\r\n"
        )
        writer.write(b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 1000):
            part = body[start : start + 1000]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    client = await connect(kind, await raw_server(talk))
    done = await client.complete(request_of())
    assert done.text == long if kind == "openai" else done.token_ids == (1,)


@KINDS
@pytest.mark.fault("CLI-14")
async def test_every_request_of_a_session_carries_its_key(connect: Any, server: Any, kind: str) -> None:
    client = await connect(kind)
    refused: set[str] = set()

    def behave(body: dict[str, Any]) -> dict[str, Any]:
        session = next(
            name for name in (f"é/task {n}" for n in range(10)) if server.headers[-1][key].endswith(name[-1])
        )
        if session in refused:
            return {}
        refused.add(session)
        return {"status": 429, "headers": {"retry-after": "0"}}

    key = "x-session-id" if kind == "openai" else "x-smg-routing-key"
    server.behave = behave

    async def play(name: str) -> None:
        session = Session(
            client,
            ledger=RequestLedger(),
            session_id=name,
            sampling=Sampling(seed=1),
            budget=Budget(50, 10_000, 10, 30),
        )
        for _ in range(5):
            await session.ask([Message("user", "go")])

    await asyncio.gather(*(play(f"é/task {n}") for n in range(10)))
    assert len(server.headers) == 60, "each session's first request was refused and sent again"
    keys = [headers[key] for headers in server.headers]
    assert {keys.count(k) for k in set(keys)} == {6}
    assert len(set(keys)) == 10
    assert len({headers["x-request-id"] for headers in server.headers}) == 60


@KINDS
@pytest.mark.fault("OBS-08")
async def test_odd_text_reaches_the_server(connect: Any, server: Any, kind: str) -> None:
    client = await connect(kind)
    session = Session(
        client, ledger=RequestLedger(), session_id="s\ud800", sampling=Sampling(), budget=Budget(50, 10_000, 10, 30)
    )
    await session.ask([Message("user", "a\ud800b\x00")])
    if kind == "openai":
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "a\ufffdb\x00"}]
    else:
        assert "a\ufffdb\x00" in client.renderer.tokenizer.decode(server.bodies[0]["input_ids"])


@KINDS
async def test_the_attempts_clock_is_not_the_infrastructures_fault(connect: Any, server: Any, kind: str) -> None:
    from rlcore.rollout.session import BudgetExhausted

    client = await connect(kind)
    server.behave = lambda body: {"seconds": 60}
    ledger = RequestLedger()
    session = Session(client, ledger=ledger, session_id="s", sampling=Sampling(), budget=Budget(50, 10_000, 10, 0.3))
    with pytest.raises(BudgetExhausted) as caught:
        await session.ask([Message("user", "x")])
    assert caught.value.reason == "timeout"
    assert ledger.metrics()["cancelled_requests"] == 1
    await until(lambda: server.live == 0, 2)
