"""Sessions spread evenly over engines, stay where they are, and leave an engine that is dead."""

from typing import Any

import pytest
from rlcore.errors import PolicyUnavailable
from rlcore.protocols import RoutingClient
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.session import Session
from rlcore.types import Budget, Message, Sampling
from rlcore_policies.routing import Router

ENGINES = ("http://a", "http://b", "http://c")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.fault("CLI-15")
def test_sessions_go_where_the_fewest_are() -> None:
    router = Router(ENGINES, rest_seconds=30)
    placed = {f"s{n}": router.route(f"s{n}") for n in range(9)}
    assert sorted(placed.values()) == sorted(ENGINES * 3)
    assert {name: router.route(name) for name in placed} == placed, "and stay there"
    ended = [name for name, engine in placed.items() if engine == ENGINES[0]]
    for name in ended:
        router.release(name)
        router.release(name)
    assert [router.route(f"new{n}") for n in range(3)] == [ENGINES[0]] * 3
    assert router.route("one more") in ENGINES


@pytest.mark.fault("CLI-15")
def test_a_dead_engine_gets_nothing_until_it_has_rested() -> None:
    clock = Clock()
    router = Router(ENGINES, rest_seconds=30, clock=clock)
    first = router.route("s")
    router.failed(first)
    moved = router.route("s")
    assert moved != first
    assert first not in {router.route(f"n{n}") for n in range(10)}
    for engine in ENGINES:
        router.failed(engine)
    with pytest.raises(PolicyUnavailable, match=r"no engine answers: http://a, http://b"):
        router.route("s")
    clock.now = 31
    assert router.route("s") == moved
    router.failed(ENGINES[1])
    router.answered(ENGINES[1])
    assert ENGINES[1] in {router.route(f"m{n}") for n in range(20)}


@pytest.mark.anyio
@pytest.mark.fault("CLI-15")
async def test_sessions_over_real_engines(connect: Any, serving: Any) -> None:
    async with serving() as a, serving() as b, serving() as c:
        client = await connect("sglang", [a.url, b.url, c.url, "http://127.0.0.1:9"])
        assert isinstance(client, RoutingClient)
        sessions = []
        lost = 0
        for n in range(10):
            session = Session(
                client, ledger=RequestLedger(), session_id=f"s{n}", sampling=Sampling(), budget=Budget(9, 999, 9, 30)
            )
            try:
                await session.ask([Message("user", "x")])
                sessions.append(session)
            except PolicyUnavailable:
                lost += 1
                session.close()
        assert lost == 1, "the first session of the dead engine found out"
        assert [len(s.bodies) for s in (a, b, c)] == [3, 3, 3]
        for session in sessions:
            await session.ask([Message("user", "y")])
        assert [len(s.bodies) for s in (a, b, c)] == [6, 6, 6]
        of_a = [s for s in sessions if f'"{s._id}' in str(a.bodies).replace("'", '"')]
        for session in of_a:
            session.close()
        for n in range(3):
            await Session(
                client, ledger=RequestLedger(), session_id=f"new{n}", sampling=Sampling(), budget=Budget(9, 999, 9, 30)
            ).ask([Message("user", "x")])
        assert [len(s.bodies) for s in (a, b, c)] == [9, 6, 6]
