"""The lease: quota costs time and not data, nothing leaks, a teardown never hides a result."""

import asyncio
import itertools
import json
import logging
import random
import time

import pytest
from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.rollout.lease import SandboxLease, lifetimes
from rlcore.types import SandboxInfo, SandboxSpec

pytestmark = pytest.mark.anyio


class Box:
    def __init__(self, backend, name, spec):
        self.backend, self.id, self.spec = backend, name, spec

    async def alive(self):
        return await self.backend.alive(self)

    async def close(self):
        await self.backend.closing(self)
        self.backend.deleted.append(self.id)
        self.backend.live.pop(self.id, None)


class Provider:
    """A provider that keeps books: what lives, what was deleted how often, how many creates ran at once."""

    def __init__(
        self,
        *,
        seconds=0.0,
        errors=(),
        close_error=None,
        close_seconds=0.0,
        quota=None,
        late=False,
        aclose_error=None,
        aclose_seconds=0.0,
    ):
        self.aclose_error, self.aclose_seconds = aclose_error, aclose_seconds
        self.seconds, self.errors, self.quota, self.late = seconds, list(errors), quota, late
        self.close_error, self.close_seconds = close_error, close_seconds
        self.live, self.deleted, self.asked, self.refused = {}, [], [], 0
        self.running = self.most_running = 0
        self.names = map("box-{}".format, itertools.count())

    async def start(self, spec):
        self.asked.append(time.monotonic())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.errors and (error := self.errors.pop(0)) is not None:
                raise error
            if self.quota is not None and len(self.live) >= self.quota[0]:
                self.refused += 1
                raise Throttled("limit exceeded", quota=True, cpus=self.quota[1])
            box = Box(self, next(self.names), spec)
            self.live[box.id] = spec
            try:
                await asyncio.sleep(self.seconds)
            except asyncio.CancelledError:
                if not self.late:  # a good backend takes back what it began; a late one has it come up all the same
                    self.deleted.append(box.id)
                    del self.live[box.id]
                    raise
            return box
        finally:
            self.running -= 1

    async def alive(self, box):
        return box.id in self.live

    async def closing(self, box):
        await asyncio.sleep(self.close_seconds)
        if self.close_error is not None:
            raise self.close_error

    async def list(self, labels):
        return [SandboxInfo(name, spec.labels) for name, spec in self.live.items()]

    async def delete(self, sandbox_id):
        self.live.pop(sandbox_id, None)

    async def aclose(self):
        await asyncio.sleep(self.aclose_seconds)
        if self.aclose_error is not None:
            raise self.aclose_error


@pytest.fixture
async def lease_of(tmp_path):
    made = []

    def make(provider, **options):
        options.setdefault("backoff_base_s", 0.01)
        options.setdefault("backoff_cap_s", 0.05)
        path = tmp_path / "sandboxes.jsonl"
        made.append(SandboxLease(provider, backend_name="test", ledger_path=path, run_id="run-1", **options))
        return made[-1]

    yield make
    for lease in made:
        await lease.aclose()


def states(tmp_path):
    return [json.loads(line)["state"] for line in (tmp_path / "sandboxes.jsonl").read_text().splitlines()]


async def test_a_sandbox_is_given_labelled_closed_and_written_down(lease_of, tmp_path):
    provider = Provider()
    lease = lease_of(provider)
    async with lease.sandbox(SandboxSpec(labels={"mine": "1"}), task_id="task-7") as box:
        assert box.spec.labels.items() >= {"mine": "1", "run": "run-1", "task": "task-7", "launcher": "rlcore"}.items()
        assert lease.stats.live == 1
        assert states(tmp_path) == ["creating", "live"], "the intent is written before the provider is asked"
    assert (provider.live, provider.deleted, states(tmp_path)[2:]) == ({}, ["box-0"], ["closing", "closed"])
    await lease.aclose()
    table = lifetimes(tmp_path / "sandboxes.jsonl")
    assert (table["created"], table["closed"], table["not_closed"]) == (1, 1, [])


@pytest.mark.fault("SBX-19")
async def test_a_retry_after_is_honoured(lease_of):
    wait = [Throttled("too many requests", retry_after=1.0)] * 2
    provider = Provider(errors=wait)
    lease = lease_of(provider)
    begun = time.monotonic()
    async with lease.sandbox(SandboxSpec(), task_id="t"):
        pass
    assert (time.monotonic() - begun >= 2, len(provider.asked), provider.deleted) == (True, 3, ["box-0"])


@pytest.mark.fault("SBX-19")
async def test_waits_double_with_jitter_up_to_the_cap_and_end(lease_of):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    provider = Provider(errors=[Throttled("slow down")] * 99)
    lease = lease_of(provider, sleep=sleep, backoff_base_s=2.0, backoff_cap_s=30.0)
    with pytest.raises(Throttled, match="slow down"):
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            raise AssertionError("no sandbox was to be had")
    assert len(waits) == 8
    for wait, most in zip(waits, [2, 4, 8, 16, 30, 30, 30, 30], strict=True):
        assert most / 2 <= wait <= most
    assert lease.stats.throttled == 9


@pytest.mark.fault("SBX-19")
async def test_creates_in_flight_are_bounded_and_a_waiting_one_is_none(lease_of):
    provider = Provider(seconds=0.01, errors=[Throttled("wait", retry_after=0.3), *[None] * 63])
    lease = lease_of(provider, creates_in_flight=1)

    async def one():
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            pass

    first = asyncio.create_task(one())
    await asyncio.sleep(0.02)
    begun = time.monotonic()
    await one()
    assert time.monotonic() - begun < 0.25, "the slot of the throttled create was not released"
    await first
    lease = lease_of(provider := Provider(seconds=0.005), creates_in_flight=8)
    await asyncio.gather(*(one() for _ in range(64)))
    assert (provider.most_running, len(provider.deleted), provider.live) == (8, 64, {})


@pytest.mark.parametrize("error", [ConfigError("cpu must be between 1 and 4"), InfraError("no such image")])
async def test_what_is_no_throttling_is_final_at_once(lease_of, error, tmp_path):
    provider = Provider(errors=[error])
    lease = lease_of(provider)
    with pytest.raises(type(error), match=str(error)):
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            raise AssertionError("no sandbox was to be had")
    assert (len(provider.asked), lease.stats.failed, states(tmp_path)) == (1, 1, ["creating", "failed"])


async def test_an_image_that_never_starts_is_not_tried_for_ever(lease_of):
    provider = Provider(errors=[InfraError("image not found: x")] * 99)
    lease = lease_of(provider, breaker_failures=3)
    for _ in range(6):
        with pytest.raises(InfraError, match="image not found: x"):
            async with lease.sandbox(SandboxSpec(image="x"), task_id="t"):
                raise AssertionError("no sandbox was to be had")
    assert len(provider.asked) == 3
    provider.errors.clear()
    async with lease.sandbox(SandboxSpec(image="y"), task_id="t"):
        pass


async def test_an_image_that_once_started_stays_trusted(lease_of):
    lease = lease_of(Provider(errors=[None, *[InfraError("flaky")] * 5]), breaker_failures=2)
    async with lease.sandbox(SandboxSpec(image="x"), task_id="t"):
        pass
    for _ in range(5):
        with pytest.raises(InfraError, match="flaky"):
            async with lease.sandbox(SandboxSpec(image="x"), task_id="t"):
                raise AssertionError("no sandbox was to be had")
    async with lease.sandbox(SandboxSpec(image="x"), task_id="t"):
        pass


@pytest.mark.fault("SBX-10")
@pytest.mark.parametrize(
    "fault",
    [{"close_error": RuntimeError("boom")}, {"close_error": SandboxLost("gone")}, {"close_seconds": 60.0}],
    ids=["raises", "gone", "hangs"],
)
async def test_a_failing_close_replaces_no_result_and_hides_no_exception(lease_of, fault, caplog):
    lease = lease_of(Provider(**fault), close_seconds=0.1)
    begun = time.monotonic()

    async def reward():
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            return 1.0

    assert await reward() == 1.0
    with pytest.raises(KeyError, match="the first"):
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            raise KeyError("the first")
    assert time.monotonic() - begun < 2
    expected = 0 if isinstance(fault.get("close_error"), SandboxLost) else 2
    assert (lease.stats.close_errors, len(caplog.records)) == (expected, expected)


@pytest.mark.fault("SBX-09")
@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("late", [False, True], ids=["taken back", "comes up late"])
@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_cancel_at_any_moment_leaves_nothing_and_deletes_once(lease_of, late, times):
    provider = Provider(seconds=0.02, close_seconds=0.01, late=late)
    lease = lease_of(provider)
    chance = random.Random(11)

    async def life():
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            await asyncio.sleep(0.02)

    for _ in range(times):
        task = asyncio.create_task(life())
        await asyncio.sleep(chance.random() * 0.06)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            continue
    await lease.aclose()
    assert provider.live == {}
    assert len(provider.deleted) == len(set(provider.deleted)) == int(next(provider.names).removeprefix("box-"))
    assert lease.stats.live == 0


@pytest.mark.fault("SBX-09")
async def test_setup_that_raises_after_the_create_leaves_nothing(lease_of):
    provider = Provider()
    lease = lease_of(provider)
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            async with lease.sandbox(SandboxSpec(), task_id="t"):
                raise error
    assert (provider.live, len(provider.deleted)) == ({}, 3)


async def test_a_cancelled_episode_still_closes_to_the_end(lease_of):
    provider = Provider(close_seconds=0.2)
    lease = lease_of(provider)

    async def life():
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            await asyncio.sleep(60)

    task = asyncio.create_task(life())
    await asyncio.sleep(0.05)
    for _ in range(4):
        task.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (provider.live, provider.deleted) == ({}, ["box-0"])


@pytest.mark.fault("SBX-10")
async def test_a_close_that_is_cancelled_stands_in_the_ledger_as_not_closed(lease_of, tmp_path, caplog):
    """The lease itself is cut short, by a caller with less patience, while a sandbox closes."""
    lease = lease_of(Provider(close_seconds=60.0))
    await lease.sandbox(SandboxSpec(), task_id="t").__aenter__()
    closing = asyncio.create_task(lease.aclose())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert states(tmp_path) == ["creating", "live", "closing", "close_failed"]
    assert lifetimes(tmp_path / "sandboxes.jsonl")["not_closed"] == ["box-0"]
    assert (lease.stats.live, lease.stats.close_errors) == (0, 1)
    assert "box-0 of test: the close was cancelled" in caplog.text
    with pytest.raises(ValueError, match="closed file"):
        lease._ledger.write({})


async def test_a_backend_that_fails_to_close_is_heard_and_the_ledger_is_closed(lease_of):
    provider = Provider(aclose_error=InfraError("no engine answers"))
    lease = lease_of(provider)
    with pytest.raises(InfraError, match="no engine answers"):
        await lease.aclose()
    with pytest.raises(ValueError, match="closed file"):
        lease._ledger.write({})
    provider.aclose_error = None


@pytest.mark.fault("SBX-10")
async def test_closing_takes_no_longer_than_its_bound(lease_of, tmp_path, caplog):
    """Sandboxes whose close hangs, a create that heeds no cancel and a backend that hangs, all at once."""
    provider = Provider(close_seconds=60.0, aclose_seconds=60.0)
    lease = lease_of(provider, close_seconds=0.2)
    for _ in range(2):
        await lease.sandbox(SandboxSpec(), task_id="t").__aenter__()
    provider.seconds, provider.late = 60.0, True
    creating = asyncio.create_task(lease.sandbox(SandboxSpec(), task_id="t").__aenter__())
    await asyncio.sleep(0.05)
    creating.cancel()
    begun = time.monotonic()
    await lease.aclose()
    assert time.monotonic() - begun < lease.close_bound < 6
    assert states(tmp_path).count("close_failed") == 3
    assert "did not close within 0.2 s" in caplog.text
    provider.aclose_seconds = 0.0


async def test_closing_the_lease_closes_what_is_open(lease_of, tmp_path):
    provider = Provider()
    lease = lease_of(provider)
    entered = [lease.sandbox(SandboxSpec(), task_id="t") for _ in range(3)]
    for one in entered:
        await one.__aenter__()
    await lease.aclose()
    assert (provider.live, len(provider.deleted)) == ({}, 3)
    with pytest.raises(InfraError, match="closing"):
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            raise AssertionError("no sandbox was to be had")


@pytest.mark.fault("SBX-19")
@pytest.mark.parametrize("cpus", [20, None], ids=["says how many", "says nothing"])
async def test_a_quota_bounds_the_creates_until_something_is_freed(lease_of, cpus):
    provider = Provider(seconds=0.005, quota=(10, cpus))
    lease = lease_of(provider, creates_in_flight=8, backoff_cap_s=5.0)
    rewards = []

    async def episode():
        async with lease.sandbox(SandboxSpec(cpus=2), task_id="t"):
            await asyncio.sleep(0.05)
            rewards.append(1.0)

    begun = time.monotonic()
    await asyncio.gather(*(episode() for _ in range(64)))
    assert len(rewards) == 64
    assert provider.refused <= 16
    assert (provider.live, len(provider.deleted)) == ({}, 64)
    assert time.monotonic() - begun < 3 * 64 * 0.055 / 10 + 1


@pytest.mark.fault("SBX-19")
async def test_a_rate_limit_is_no_quota(lease_of):
    """It ends with time: nobody waits for something to be freed, whatever words the provider found."""
    provider = Provider(errors=[None, Throttled("ThrottlerException: Too Many Requests")])
    lease = lease_of(provider, backoff_cap_s=5.0)
    async with lease.sandbox(SandboxSpec(), task_id="holds"):
        await asyncio.wait_for(lease.sandbox(SandboxSpec(), task_id="waits").__aenter__(), 2)


async def test_a_shared_quota_is_asked_again_though_nothing_of_ours_is_freed(lease_of):
    provider = Provider(quota=(1, None))
    lease = lease_of(provider)
    async with lease.sandbox(SandboxSpec(), task_id="holds"):
        waiting = asyncio.create_task(lease.sandbox(SandboxSpec(), task_id="waits").__aenter__())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        provider.quota = None  # somebody else freed theirs
        await asyncio.wait_for(waiting, 2)
    await lease.aclose()


async def test_a_pool_has_the_next_one_ready_and_hands_none_out_twice(lease_of):
    provider = Provider(seconds=0.1)
    lease = lease_of(provider, pool=2)
    waits, names = [], []
    for _ in range(4):
        begun = time.monotonic()
        async with lease.sandbox(SandboxSpec(image="x"), task_id="t") as box:
            waits.append(time.monotonic() - begun)
            names.append(box.id)
        await asyncio.sleep(0.25)
    assert waits[0] >= 0.1
    assert max(waits[1:]) < 0.09
    assert len(set(names)) == 4
    assert len(provider.live) == 2
    await lease.aclose()
    assert provider.live == {}
    assert len(provider.deleted) == len(set(provider.deleted)) == len(provider.asked)


async def test_a_pool_gives_no_dead_sandbox_and_a_refusal_is_no_fault(lease_of):
    provider = Provider()
    lease = lease_of(provider, pool=1)
    async with lease.sandbox(SandboxSpec(), task_id="t"):
        await asyncio.sleep(0.05)
    provider.live.clear()
    provider.errors = [Throttled("later"), None, Throttled("later")]
    async with lease.sandbox(SandboxSpec(), task_id="t") as box:
        assert box.id in provider.live


async def test_the_lease_costs_less_than_a_millisecond(lease_of):
    lease = lease_of(Provider())
    costs = []
    for _ in range(50):
        begun = time.perf_counter()
        async with lease.sandbox(SandboxSpec(), task_id="t"):
            pass
        costs.append(time.perf_counter() - begun)
    assert sorted(costs)[25] < 0.005, "five times the target, for a loaded machine"


async def test_the_ledger_of_a_dead_run_says_what_is_open(lease_of, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    provider = Provider()
    lease = lease_of(provider)
    await lease.sandbox(SandboxSpec(), task_id="t").__aenter__()
    with (tmp_path / "sandboxes.jsonl").open("a") as file:
        file.write('{"state": "clos')
    assert lifetimes(tmp_path / "sandboxes.jsonl")["not_closed"] == ["box-0"]
    await lease.aclose()
