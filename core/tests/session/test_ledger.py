"""The ledger knows every request from intent to end, also after a crash, and finds zombies."""

import json
from pathlib import Path
from typing import Any

import pytest
from rlcore.rollout.ledger import REMEMBERED, RequestLedger
from rlcore.types import ModelRequest, Sampling


def request(name: str) -> ModelRequest:
    return ModelRequest(id=name, session_id="s", max_tokens=5, sampling=Sampling(), seconds=1, prompt_ids=(1, 2))


def events(path: Path) -> list[tuple[str, str]]:
    return [(r["event"], r.get("id")) for r in map(json.loads, path.read_text().splitlines())]


def test_every_event_is_written_and_counted(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "requests.jsonl"
    ledger = RequestLedger(path, clock=clock)
    for name in "abcd":
        ledger.intent(request(name), turn=0)
        ledger.opened(name)
    clock.now += 2
    ledger.answered("a", tokens=7, policy_version=3)
    ledger.cancelled("b")
    ledger.failed("c", "no log-probs", tokens=5)
    ledger.aborted("d", tokens=4)
    ledger.intent(request("e"), turn=1)
    assert ledger.metrics() == {
        "open_requests": 1,
        "answered_requests": 1,
        "cancelled_requests": 1,
        "failed_requests": 1,
        "aborted_requests": 1,
        "lost_requests": 0,
        "rewritten_prompts": 0,
        "wasted_tokens": 9,
        "zombie_requests": 0,
    }
    ledger.close()
    assert events(path)[-5:] == [
        ("answered", "a"),
        ("cancelled", "b"),
        ("failed", "c"),
        ("aborted", "d"),
        ("intent", "e"),
    ]
    records = list(map(json.loads, path.read_text().splitlines()))
    assert records[0] == {
        "event": "intent", "id": "a", "time": records[0]["time"], "session": "s", "turn": 0, "prompt_tokens": 2, "max_tokens": 5,
    }  # fmt: skip
    assert {"tokens": 7, "policy_version": 3, "seconds": 2.0}.items() <= records[8].items()


def test_the_intent_is_there_before_the_request_is_sent(tmp_path: Path) -> None:
    ledger = RequestLedger(tmp_path / "requests.jsonl")
    ledger.intent(request("a"), turn=0)
    assert events(ledger._writer.path) == [("intent", "a")]  # type: ignore[union-attr]  # read while it is still open
    ledger.close()


@pytest.mark.fault("CKP-08")
def test_a_crash_leaves_lost_requests_that_are_closed_by_the_next_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    first = RequestLedger(path)
    for name in ("a", "b", "odd\u2028\ud800"):
        first.intent(request(name), turn=0)
    first.answered("a", tokens=1, policy_version=0)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"event":"intent","id":"cut')
    second = RequestLedger(path)
    assert "cut" in caplog.text
    assert second.metrics()["lost_requests"] == 2
    assert second.reconcile(["a", "b", "another's"]) == {"b"}
    second.close()
    third = RequestLedger(path)
    assert third.metrics()["lost_requests"] == 0
    third.close()


def test_zombies_are_what_was_closed_here_and_runs_there(clock: Any) -> None:
    ledger = RequestLedger(clock=clock)
    for name in "abc":
        ledger.intent(request(name), turn=0)
    ledger.cancelled("a")
    asked = clock.now = 200.0
    clock.now += 1
    ledger.answered("b", tokens=1, policy_version=0)  # ended while the engine was answering: no zombie
    assert ledger.reconcile(["a", "b", "c", "of another run"], asked=asked) == {"a"}
    assert ledger.metrics()["zombie_requests"] == 1
    assert ledger.reconcile(["c"]) == frozenset()
    assert ledger.metrics()["zombie_requests"] == 0


@pytest.mark.anyio
@pytest.mark.fault("CLI-01")
async def test_a_sweep_aborts_zombies_and_nothing_else(open_session: Any, clock: Any) -> None:
    _, client, ledger = open_session([])
    for name in "ab":
        ledger.intent(request(name), turn=0)
    ledger.cancelled("a")
    client.works_on = {"a", "b", "foreign"}
    assert await ledger.sweep(client) == {"a"}
    assert client.aborted == ["a"]
    assert await ledger.sweep(client) == frozenset()


def test_memory_is_bounded() -> None:
    ledger = RequestLedger()
    for n in range(REMEMBERED + 10):
        ledger.intent(request(str(n)), turn=0)
        ledger.answered(str(n), tokens=1, policy_version=0)
    assert len(ledger._closed) == REMEMBERED
    assert ledger.reconcile([str(REMEMBERED)]) == {str(REMEMBERED)}
