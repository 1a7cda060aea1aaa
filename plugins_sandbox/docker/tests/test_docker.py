"""What is Docker's own: images, limits, leaks, faults of the engine."""

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
from rlcore.errors import ConfigError, InfraError, SandboxLost
from rlcore.rollout.lease import SandboxLease
from rlcore.types import SandboxSpec
from rlcore_docker.images import content_hash

pytestmark = pytest.mark.anyio
BUSYBOX = "rlcore-test-busybox:1"


def containers(client, run):
    return client.api.containers(all=True, filters={"label": f"run={run}"})


@pytest.mark.fault("SBX-09")
@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_cancel_at_any_moment_leaves_no_container(backend, client, times, tmp_path):
    lease = SandboxLease(backend, backend_name="docker", ledger_path=tmp_path / "l.jsonl", run_id=f"cancel-{times}")
    chance = random.Random(3)

    async def life():
        async with lease.sandbox(SandboxSpec(), task_id="t") as box:
            await box.exec("sleep 60", timeout=90)

    async def cut():
        task = asyncio.create_task(life())
        await asyncio.sleep(chance.random() * 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(times // 8):
        await asyncio.gather(*(cut() for _ in range(8)))
    await lease.aclose()
    assert containers(client, f"cancel-{times}") == []
    assert lease.stats.live == 0


@pytest.mark.fault("SBX-23")
async def test_many_sandboxes_of_one_task_leave_no_container_and_no_network(backend, client):
    networks = len(client.api.networks())

    async def one(number):
        box = await backend.start(SandboxSpec(labels={"run": "many", "task": "same"}))
        try:
            assert (await box.exec("sleep 60", timeout=0.3)).timed_out
        finally:
            await box.close()
        return box.id

    names = []
    for _ in range(2):
        names += await asyncio.gather(*map(one, range(8)))
    assert len(set(names)) == 16
    assert (containers(client, "many"), len(client.api.networks())) == ([], networks)


@pytest.mark.fault("SBX-21")
async def test_the_limits_are_the_engine_s_and_out_of_memory_is_told(backend, client):
    box = await backend.start(SandboxSpec(memory_mb=32, cpus=0.5))
    host = client.api.inspect_container(box.id)["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (32 << 20, 32 << 20, 500_000_000)
    assert (host["NetworkMode"], host["CapDrop"], host["Init"], host["PidsLimit"]) == ("none", ["ALL"], True, 512)
    result = await box.exec("tail /dev/zero", timeout=30)
    assert (result.exit_code, result.oom, result.timed_out) == (137, True, False)
    result = await box.exec("kill -9 $$", timeout=30)
    assert result.exit_code == 137
    result = await box.exec("exit 124", timeout=5)
    assert (result.exit_code, result.oom) == (124, False)


@pytest.mark.fault("SBX-04")
async def test_a_timeout_needs_no_word_of_the_engine(backend):
    box = await backend.start(SandboxSpec())
    begun = time.monotonic()
    assert (await box.exec("sleep 5", timeout=2)).timed_out
    assert 1.9 < time.monotonic() - begun < 4


async def test_a_command_that_kills_its_shell_is_a_result_and_the_next_one_runs(backend):
    box = await backend.start(SandboxSpec())
    result = await box.exec("echo said; kill -9 $PPID; sleep 5", timeout=10)
    assert (result.exit_code, "said" in result.stdout) == (137, True)
    assert (await box.exec("echo on", timeout=5)).stdout == "on\n"


async def test_output_of_a_background_child_does_not_reach_the_next_command(backend):
    box = await backend.start(SandboxSpec())
    await box.exec("while true; do echo noise; sleep 0.02; done &", timeout=5)
    for _ in range(5):
        assert (await box.exec("sleep 0.05; echo clean", timeout=5)).stdout == "clean\n"


async def test_a_container_killed_from_outside_is_lost(backend, client):
    box = await backend.start(SandboxSpec())
    running = asyncio.create_task(box.exec("sleep 60", timeout=90))
    await asyncio.sleep(0.5)
    client.api.kill(box.id)
    with pytest.raises(SandboxLost):
        await running
    with pytest.raises(SandboxLost):
        await box.write_file("/tmp/x", b"x")
    assert not await box.alive()


async def test_a_dockerfile_is_built_once_per_content(backend, client, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {BUSYBOX}\nRUN echo built > /made\nENV MADE=yes\n")
    spec = SandboxSpec(build_context=str(tmp_path))
    boxes = await asyncio.gather(*(backend.start(spec) for _ in range(3)))
    for box in boxes:
        assert (await box.exec("cat /made; echo $MADE", timeout=5)).stdout == "built\nyes\n"
    tag = f"rlcore-task:{content_hash(tmp_path)[:24]}"
    created = client.images.get(tag).attrs["Created"]
    await backend.start(spec)
    assert client.images.get(tag).attrs["Created"] == created
    (tmp_path / "other").write_text("x")
    assert f"rlcore-task:{content_hash(tmp_path)[:24]}" != tag


@pytest.fixture
def make_backend(make_backend, monkeypatch):
    """Builds without BuildKit and without a network, as the private engine can."""
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    return lambda **options: make_backend(**{"build_network": "none", **options})


@pytest.mark.parametrize(
    ("files", "said"),
    [({}, "Dockerfile is not there"), ({"Dockerfile": f"FROM {BUSYBOX}\nRUN echo broken && exit 3\n"}, "broken")],
)
async def test_a_dockerfile_that_cannot_be_built_is_a_configuration_error(backend, tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        await backend.start(SandboxSpec(build_context=str(tmp_path)))


async def test_an_image_that_is_nowhere_is_an_error_that_names_it(backend):
    with pytest.raises((ConfigError, InfraError), match="no-such-image"):
        await backend.start(SandboxSpec(image="127.0.0.1:9/no-such-image:1"))


async def test_no_engine_is_an_error_that_says_what_to_do(make_backend, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(InfraError, match="DOCKER_HOST"):
            await make_backend().start(SandboxSpec())


DYING = """
import asyncio, sys
from rlcore.sandbox_tools import ownership
from rlcore.types import SandboxSpec
from rlcore_docker.backend import DockerBackend

async def main():
    backend = DockerBackend(DockerBackend.Config(image=sys.argv[1]))
    await asyncio.gather(*(backend.start(SandboxSpec(labels=ownership("dies"))) for _ in range(16)))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_sigkill_of_the_trainer_and_a_sweep_leave_nothing_of_it(backend, client):
    foreign = await backend.start(SandboxSpec(labels={"launcher": "somebody", "run": "dies"}))
    trainer = subprocess.Popen([sys.executable, "-c", DYING, BUSYBOX], stdout=subprocess.PIPE, text=True)
    assert await asyncio.to_thread(trainer.stdout.readline) == "ready\n"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert len(containers(client, "dies")) == 17
    sweep = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rlcore.cli import main; main()", "sandboxes", "sweep", "-b", "docker"),
        stdout=subprocess.PIPE,
    )
    out, _ = await sweep.communicate()
    assert (sweep.returncode, out.decode().count("deleted")) == (0, 16)
    assert [one["Names"][0].lstrip("/") for one in containers(client, "dies")] == [foreign.id]
    assert await foreign.alive()
