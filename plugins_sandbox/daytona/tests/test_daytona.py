"""Faults of the provider and of the way to it: nothing leaks, quota costs time, a command runs once."""

import asyncio
import gc
import random
import subprocess
import sys
import time
import weakref

import pytest
import rlcore_daytona.backend
from pydantic import ValidationError
from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.rollout.lease import SandboxLease
from rlcore.types import SandboxSpec
from rlcore_daytona.backend import DaytonaBackend, preflight

pytestmark = pytest.mark.anyio
QUOTAS = [
    (400, "Total CPU limit exceeded. Maximum allowed: 500."),
    (403, "Total CPU limit exceeded. Maximum allowed: 500."),
    (400, "Total disk limit exceeded"),
    (403, "Total memory limit exceeded"),
    (400, "Sandbox resource limit reached (16), please try again later."),
    (503, "No available runners"),
]


@pytest.mark.fault("SBX-19")
async def test_a_rate_limit_says_how_long_to_wait(backend, server):
    server.faults["create"] = [(429, "ThrottlerException: Too Many Requests", {"Retry-After": "1"})]
    with pytest.raises(Throttled) as caught:
        await backend.start(SandboxSpec())
    assert (caught.value.retry_after, caught.value.quota) == (1.0, False)


@pytest.mark.fault("SBX-19")
@pytest.mark.parametrize("refusal", QUOTAS, ids=lambda refusal: f"{refusal[0]} {refusal[1][:22]}")
async def test_a_used_up_quota_is_throttling_in_every_wording(backend, server, refusal):
    server.faults["create"] = [refusal]
    with pytest.raises(Throttled) as caught:
        await backend.start(SandboxSpec())
    assert (caught.value.quota, caught.value.cpus) == (True, 500.0 if "CPU" in refusal[1] else None)


@pytest.mark.parametrize(
    "refusal", [(400, "cpu must be between 1 and 4"), (403, "Forbidden"), (404, "Snapshot not found")]
)
async def test_a_wrong_configuration_is_no_throttling(backend, server, refusal):
    server.faults["create"] = [refusal]
    with pytest.raises(ConfigError, match=refusal[1]):
        await backend.start(SandboxSpec())


@pytest.mark.fault("SBX-09")
@pytest.mark.parametrize("fault", ["drop before", "drop after"])
async def test_a_create_whose_answer_is_lost_leaves_nothing(backend, server, fault, settled):
    server.faults["create"] = [fault]
    with pytest.raises(InfraError):
        await backend.start(SandboxSpec())
    await settled(lambda: not server.records)
    assert len(server.deleted) == (fault == "drop after")


@pytest.mark.fault("SBX-09")
async def test_a_sandbox_that_comes_up_broken_is_deleted(backend, server, settled):
    server.faults["start"] = ["error"]
    with pytest.raises(InfraError):
        await backend.start(SandboxSpec())
    await settled(lambda: server.deleted == ["box-1"])


@pytest.mark.fault("SBX-09")
async def test_a_slow_create_that_is_cancelled_is_deleted_when_it_is_there(make_backend, server, settled):
    server.create_seconds = 1.0
    backend = make_backend()
    task = asyncio.create_task(backend.start(SandboxSpec()))
    await asyncio.sleep(0.6)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.aclose()
    assert (server.records, server.deleted) == ({}, ["box-1"])


@pytest.mark.fault("SBX-09")
@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_cancel_at_any_moment_leaves_nothing_and_deletes_once(make_backend, server, times, tmp_path):
    backend = make_backend()
    lease = SandboxLease(backend, backend_name="daytona", ledger_path=tmp_path / "l.jsonl", run_id="cancel")
    chance = random.Random(5)

    async def life():
        async with lease.sandbox(SandboxSpec(), task_id="t") as box:
            await box.exec("sleep 60", timeout=90)

    async def cut():
        task = asyncio.create_task(life())
        await asyncio.sleep(chance.random() * 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(times // 8):
        await asyncio.gather(*(cut() for _ in range(8)))
    await lease.aclose()
    assert (server.records, server.boxes) == ({}, {})
    assert len(server.deleted) == len(set(server.deleted))


@pytest.mark.fault("SBX-14")
@pytest.mark.parametrize("fault", ["drop before", "drop after"])
async def test_a_command_whose_answer_is_lost_runs_once(backend, server, fault):
    box = await backend.start(SandboxSpec())
    server.faults["execute"] = [fault]
    result = await box.exec("echo ran >> /tmp/log; cat /tmp/log; exit 3", timeout=10)
    assert (result.exit_code, result.stdout) == (3, "ran\n")
    assert (await box.exec("echo 2", timeout=5)).stdout == "2\n"


@pytest.mark.fault("SBX-04")
async def test_a_command_may_take_longer_than_any_one_request(backend, server, monkeypatch):
    monkeypatch.setattr("rlcore.shell_sandbox.FIRST_WAIT", 1.0)
    box = await backend.start(SandboxSpec())
    assert (await box.exec("sleep 3; echo done", timeout=20)).stdout == "done\n"
    begun = time.monotonic()
    assert (await box.exec("sleep 5", timeout=2)).timed_out
    assert 1.9 < time.monotonic() - begun < 5


@pytest.mark.fault("SBX-09")
@pytest.mark.parametrize("fault", [(500, "oops"), (409, "state change in progress"), "drop after"], ids=str)
async def test_a_lost_delete_is_asked_for_again(backend, server, fault):
    box = await backend.start(SandboxSpec())
    server.faults["delete"] = [fault]
    await box.close()
    assert (server.records, server.deleted) == ({}, ["box-1"])


async def test_nothing_is_kept_of_a_sandbox_that_was_closed(backend):
    """A run opens thousands; a backend that kept them would grow with every one."""
    box = await backend.start(SandboxSpec())
    kept = weakref.ref(box)
    await box.close()
    del box
    gc.collect()
    assert kept() is None


@pytest.mark.fault("SBX-10")
async def test_a_sandbox_that_cannot_be_closed_keeps_no_other_open(backend, server, monkeypatch):
    """Its error is heard at the end; that it was tried is not kept, so that a second close of the backend is quiet."""
    boxes = [await backend.start(SandboxSpec()) for _ in range(3)]
    delete = rlcore_daytona.backend._delete

    async def refuse_one(sandbox):
        if sandbox.id == boxes[0].id:
            raise InfraError("was not deleted")
        await asyncio.sleep(0.2)
        await delete(sandbox)

    with monkeypatch.context() as patch:
        patch.setattr(rlcore_daytona.backend, "_delete", refuse_one)
        with pytest.raises(InfraError, match="was not deleted"):
            await backend.aclose()
    assert sorted(server.deleted) == sorted(box.id for box in boxes[1:])
    await backend.delete(boxes[0].id)


@pytest.mark.fault("SBX-21")
async def test_a_sandbox_that_was_deleted_is_lost(backend, server):
    box = await backend.start(SandboxSpec())
    await backend.delete(box.id)
    with pytest.raises(SandboxLost):
        await box.exec("true", timeout=5)
    with pytest.raises(SandboxLost):
        await box.write_file("/tmp/x", b"x")


@pytest.mark.fault("SBX-20")
async def test_a_sandbox_outlives_its_task_and_is_reclaimed_after(backend, server):
    await backend.start(SandboxSpec())
    await backend.start(SandboxSpec(lifetime_s=3600))
    intervals = [(one["autoStopInterval"], one["autoDeleteInterval"]) for one in server.log]
    assert intervals == [(30, 120), (61, 120)]
    assert next(p.message for p in preflight(DaytonaBackend.Config(auto_stop_min=15), 3600.0)).startswith(
        "sandboxes stop after 15"
    )


@pytest.mark.fault("SBX-22")
async def test_resources_are_whole_numbers_on_the_wire(backend, server):
    await backend.start(SandboxSpec(cpus=1.5, memory_mb=1500, disk_mb=100, network=True))
    body = server.log[0]
    assert (body["cpu"], body["memory"], body["disk"], body["networkBlockAll"]) == (2, 2, 1, False)


async def test_a_dockerfile_is_sent_and_a_missing_one_named(backend, server, tmp_path):
    with pytest.raises(ConfigError, match="Dockerfile is not there"):
        await backend.start(SandboxSpec(build_context=str(tmp_path)))
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nRUN echo hi\n")
    await backend.start(SandboxSpec(build_context=str(tmp_path)))
    assert server.log[0]["buildInfo"]["dockerfileContent"] == "FROM debian:12\nRUN echo hi\n"


async def test_sandboxes_are_listed_over_pages(make_backend, server):
    backend = make_backend()
    await asyncio.gather(*(backend.start(SandboxSpec(labels={"mine": "1"})) for _ in range(9)))
    assert len(await backend.list({"mine": "1"})) == 9
    await backend.aclose()
    assert server.records == {}


async def test_missing_or_wrong_credentials_are_a_configuration_error(make_backend, server, monkeypatch, tmp_path):
    monkeypatch.setenv("DAYTONA_API_KEY", "bad-key")
    backend = make_backend()
    with pytest.raises(ConfigError, match="Unauthorized"):
        await backend.start(SandboxSpec())
    await backend.aclose()
    (tmp_path / "key").write_text("good-key\n")
    monkeypatch.setenv("OTHER_KEY", "good-key")
    for place in ({"file": str(tmp_path / "key")}, {"env": "OTHER_KEY"}):
        backend = make_backend(api_key=place)
        await backend.start(SandboxSpec())
        await backend.aclose()
        assert "good-key" not in backend.config.model_dump_json() + repr(backend.config)
    with pytest.raises(ConfigError, match=r"no secret in file .*absent"):
        await make_backend(api_key={"file": str(tmp_path / "absent")}).start(SandboxSpec())
    with pytest.raises(ValidationError, match="a secret is not written down"):
        make_backend(api_key="good-key")
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(ConfigError, match="DAYTONA_API_KEY"):
        await make_backend().start(SandboxSpec())


@pytest.mark.fault("SBX-19")
async def test_64_episodes_under_a_quota_of_20_cpus_all_finish(make_backend, server, tmp_path):
    server.cpu_quota = 20
    backend = make_backend()
    lease = SandboxLease(
        backend, backend_name="daytona", ledger_path=tmp_path / "l.jsonl", run_id="quota", creates_in_flight=8
    )
    creates, rewards = [], []

    async def episode():
        begun = time.monotonic()
        async with lease.sandbox(SandboxSpec(cpus=2), task_id="t") as box:
            creates.append(time.monotonic() - begun)
            await asyncio.sleep(2)
            rewards.append(float((await box.exec("exit 0", timeout=30)).exit_code == 0))

    begun = time.monotonic()
    await asyncio.gather(*(episode() for _ in range(64)))
    wall = time.monotonic() - begun
    assert rewards == [1.0] * 64
    assert lease.stats.throttled <= 16
    assert lease.stats.most_live <= 10
    print(f"64 episodes in {wall:.1f} s, {lease.stats.throttled} creates refused, shortest create {min(creates):.2f} s")
    await lease.aclose()
    assert server.records == {}


DYING = """
import asyncio
from rlcore.sandbox_tools import ownership
from rlcore.types import SandboxSpec
from rlcore_daytona.backend import DaytonaBackend

async def main():
    backend = DaytonaBackend(DaytonaBackend.Config(image="debian:12"))
    await asyncio.gather(*(backend.start(SandboxSpec(labels=ownership("dies"))) for _ in range(16)))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_sigkill_of_the_trainer_and_a_sweep_leave_nothing_of_it(backend, server):
    foreign = await backend.start(SandboxSpec(labels={"launcher": "somebody", "run": "dies"}))
    trainer = subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True)
    assert await asyncio.to_thread(trainer.stdout.readline) == "ready\n"
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert len(server.records) == 17
    sweep = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rlcore.cli import main; main()", "sandboxes", "sweep", "-b", "daytona"),
        stdout=subprocess.PIPE,
    )
    out, _ = await sweep.communicate()
    assert (sweep.returncode, out.decode().count("deleted")) == (0, 16)
    assert list(server.records) == [foreign.id]
