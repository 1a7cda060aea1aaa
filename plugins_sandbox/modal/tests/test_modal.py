"""Faults of the provider and of the way to it: nothing leaks, quota costs time, a command runs once."""

import asyncio
import gc
import random
import subprocess
import sys
import time
import weakref

import pytest
import rlcore_modal.backend
from grpclib.const import Status
from rlcore.errors import ConfigError, InfraError, SandboxLost, Throttled
from rlcore.rollout.lease import SandboxLease
from rlcore.types import SandboxSpec
from rlcore_modal.backend import ModalBackend, preflight

pytestmark = pytest.mark.anyio


@pytest.mark.fault("SBX-19")
@pytest.mark.parametrize(
    "refusal",
    [
        (Status.RESOURCE_EXHAUSTED, "Sandbox limit of the workspace reached"),
        (Status.FAILED_PRECONDITION, "Too many sandboxes: the maximum allowed is 100"),
    ],
    ids=lambda refusal: refusal[0].name,
)
async def test_a_used_up_quota_is_throttling(backend, server, refusal):
    server.faults["create"] = [refusal]
    with pytest.raises(Throttled) as caught:
        await backend.start(SandboxSpec())
    assert caught.value.quota


@pytest.mark.parametrize(
    "refusal",
    [(Status.INVALID_ARGUMENT, "memory must be at least 128"), (Status.PERMISSION_DENIED, "not yours")],
    ids=lambda refusal: refusal[0].name,
)
async def test_a_wrong_configuration_is_no_throttling(backend, server, refusal):
    server.faults["create"] = [refusal]
    with pytest.raises(ConfigError, match=refusal[1]):
        await backend.start(SandboxSpec())


async def test_an_image_that_does_not_build_is_a_configuration_error(backend, server, tmp_path):
    with pytest.raises(ConfigError, match="Dockerfile is not there"):
        await backend.start(SandboxSpec(build_context=str(tmp_path)))
    with pytest.raises(ConfigError, match="does not build"):
        await backend.start(SandboxSpec(image="broken:1"))


@pytest.mark.fault("SBX-09")
@pytest.mark.parametrize("lost", [1, 8], ids=["once", "for good"])
async def test_a_create_whose_answer_is_lost_leaves_nothing(make_backend, server, lost):
    backend = make_backend()
    server.faults["create"] = ["lost answer"] * lost
    if lost == 1:
        await (await backend.start(SandboxSpec())).close()
    else:
        with pytest.raises(InfraError):
            await backend.start(SandboxSpec())
        server.faults["create"].clear()
    await backend.aclose()
    assert server.boxes == {}
    assert len(server.deleted) == len(server.creates) == 1


@pytest.mark.fault("SBX-09")
async def test_a_slow_create_that_is_cancelled_is_deleted_when_it_is_there(make_backend, server):
    server.create_seconds = 1.0
    backend = make_backend()
    task = asyncio.create_task(backend.start(SandboxSpec()))
    await asyncio.sleep(0.8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.aclose()
    assert server.boxes == {}
    assert len(server.deleted) == len(server.creates)


@pytest.mark.fault("SBX-09")
@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_cancel_at_any_moment_leaves_nothing_and_deletes_once(make_backend, server, times, tmp_path):
    backend = make_backend()
    lease = SandboxLease(backend, backend_name="modal", ledger_path=tmp_path / "l.jsonl", run_id="cancel")
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
    assert server.boxes == {}
    assert len(server.deleted) == len(set(server.deleted)) == len(server.creates)


@pytest.mark.fault("SBX-04")
async def test_a_timeout_of_the_sdk_that_does_not_raise_is_seen(backend, server):
    box = await backend.start(SandboxSpec())
    begun = time.monotonic()
    assert (await box.exec("sleep 5", timeout=2)).timed_out
    assert 1.9 < time.monotonic() - begun < 5


@pytest.mark.fault("SBX-14")
async def test_the_second_run_of_a_command_is_not_the_first(backend, server):
    box = await backend.start(SandboxSpec())
    first = await box.exec("echo 1; exit 3", timeout=10)
    second = await box.exec("echo 2", timeout=10)
    assert [(one.exit_code, one.stdout) for one in (first, second)] == [(3, "1\n"), (0, "2\n")]


@pytest.mark.fault("SBX-09")
async def test_a_lost_delete_is_asked_for_again(backend, server):
    box = await backend.start(SandboxSpec())
    server.faults["terminate"] = ["lost answer"]
    await box.close()
    assert (server.boxes, server.deleted) == ({}, [box.id])


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
    delete = rlcore_modal.backend._terminated

    async def refuse_one(terminate, sandbox_id):
        if sandbox_id == boxes[0].id:
            raise InfraError("was not deleted")
        await asyncio.sleep(0.2)
        await delete(terminate, sandbox_id)

    with monkeypatch.context() as patch:
        patch.setattr(rlcore_modal.backend, "_terminated", refuse_one)
        with pytest.raises(InfraError, match="was not deleted"):
            await backend.aclose()
    assert sorted(server.deleted) == sorted(box.id for box in boxes[1:])
    await backend.delete(boxes[0].id)


@pytest.mark.fault("SBX-21")
async def test_a_sandbox_that_was_terminated_is_lost(backend, server):
    box = await backend.start(SandboxSpec())
    await backend.delete(box.id)
    with pytest.raises(SandboxLost):
        await box.exec("true", timeout=5)
    assert not await box.alive()


@pytest.mark.fault("SBX-20")
async def test_limits_and_times_are_on_the_wire(backend, server):
    await backend.start(SandboxSpec(cpus=1.5, memory_mb=256, lifetime_s=3600.5, network=False))
    wanted = server.creates[0].definition
    assert (wanted.timeout_secs, wanted.idle_timeout_secs) == (3601, 1800)
    assert (wanted.resources.milli_cpu, wanted.resources.memory_mb, wanted.resources.memory_mb_max) == (1500, 256, 256)
    assert wanted.network_access.network_access_type == wanted.network_access.BLOCKED


@pytest.mark.fault("SBX-20")
def test_a_timeout_below_the_episode_s_clock_is_a_problem_before_training(server):
    [problem] = [one for one in preflight(ModalBackend.Config(timeout_s=600), 3600.0) if one.fatal]
    assert "end after 600 s" in problem.message
    assert preflight(ModalBackend.Config(idle_timeout_s=7200), 3600.0) == []


async def test_sandboxes_are_listed_over_pages(make_backend, server):
    backend = make_backend()
    await asyncio.gather(*(backend.start(SandboxSpec(labels={"mine": "1"})) for _ in range(9)))
    assert len(await backend.list({"mine": "1"})) == 9
    await backend.aclose()
    assert server.boxes == {}


async def test_wrong_credentials_are_a_configuration_error(make_backend, server, monkeypatch):
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-bad")
    backend = make_backend()
    with pytest.raises(ConfigError, match="MODAL_TOKEN_ID"):
        await backend.start(SandboxSpec())
    await backend.aclose()


DYING = """
import asyncio
from rlcore.sandbox_tools import ownership
from rlcore.types import SandboxSpec
from rlcore_modal.backend import ModalBackend

async def main():
    backend = ModalBackend(ModalBackend.Config())
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
    assert len(server.boxes) == 17
    sweep = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rlcore.cli import main; main()", "sandboxes", "sweep", "-b", "modal"),
        stdout=subprocess.PIPE,
    )
    out, _ = await sweep.communicate()
    assert (sweep.returncode, out.decode().count("deleted")) == (0, 16)
    assert list(server.boxes) == [foreign.id]
