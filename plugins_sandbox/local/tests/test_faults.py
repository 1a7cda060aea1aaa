"""Faults of real systems, with their own inputs, and attacks from inside."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlcore.errors import ConfigError, SandboxLost
from rlcore.types import SandboxSpec

pytestmark = pytest.mark.anyio


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.fault("SBX-01")
async def test_a_child_that_holds_the_output_does_not_hold_the_command(box):
    begun = time.monotonic()
    result = await box.exec("sleep 300 & echo hi", timeout=5)
    assert (result.stdout, result.exit_code) == ("hi\n", 0)
    result = await box.exec("setsid sh -c 'sleep 300' >/dev/null &", timeout=5)
    assert result.exit_code == 0
    assert time.monotonic() - begun < 2
    await box.exec("nohup python3 -m http.server 8123 --bind 127.0.0.1 &", timeout=5)
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8123').status)"
    for _ in range(40):
        result = await box.exec(["python3", "-c", ask], timeout=5)
        if result.exit_code == 0:
            break
        await asyncio.sleep(0.1)
    assert result.stdout == "200\n", result


@pytest.mark.fault("SBX-04")
async def test_a_long_command_is_not_cut_and_a_short_timeout_is_not_late(box):
    begun = time.monotonic()
    assert (await box.exec("sleep 5", timeout=2)).timed_out
    assert 1.9 < time.monotonic() - begun < 4
    assert (await box.exec("sleep 3; echo done", timeout=10)).stdout == "done\n"


@pytest.mark.fault("SBX-05")
async def test_binary_output_is_text_with_replacement(box):
    result = await box.exec(r"printf '\xff\xfeA'", timeout=5)
    assert ("\ufffd" in result.stdout, "A" in result.stdout, result.exit_code) == (True, True, 0)
    assert (await box.exec("head -c 1000 /dev/urandom", timeout=5)).exit_code == 0
    assert (await box.exec(r"printf '\xe2\x82'; sleep 0.2; printf '\xac'", timeout=5)).stdout == "€"
    assert (await box.exec(r"printf 'a\0b'", timeout=5)).stdout == "a\0b"


@pytest.mark.fault("SBX-07")
async def test_huge_output_is_never_held_whole(box):
    before, begun = resident(), time.monotonic()
    result = await box.exec("yes | head -c 50000000", timeout=30)
    assert time.monotonic() - begun < 10
    assert resident() - before < 20e6
    assert (len(result.stdout) <= 64 * 1024, result.truncated, result.exit_code) == (True, True, 0)
    missing = int(result.stdout.partition("[... ")[2].partition(" bytes")[0])
    kept = len(result.stdout.partition("\n[...")[0]) + len(result.stdout.rpartition("...]\n")[2])
    assert missing + kept == 50_000_000
    result = await box.exec("yes", timeout=3)
    assert (result.timed_out, result.truncated) == (True, True)
    result = await box.exec("yes | head -c 300000 >&2; echo out", timeout=5, max_output=1000)
    assert (result.stdout, len(result.stderr) <= 1000) == ("out\n", True)


@pytest.mark.fault("SBX-08")
@pytest.mark.parametrize(
    "command", ["cat", "python3 -c 'input()'", "read x", "head -n 1 < /dev/tty", "exec < /dev/tty"]
)
async def test_an_interactive_command_gets_no_input_at_once(box, command):
    begun = time.monotonic()
    assert not (await box.exec(command, timeout=10)).timed_out
    assert time.monotonic() - begun < 2


@pytest.mark.fault("SBX-14")
async def test_the_second_run_of_a_command_is_not_the_first(box):
    first = await box.exec("echo 1; exit 3", timeout=5)
    second = await box.exec("echo 2", timeout=5)
    assert [(one.exit_code, one.stdout) for one in (first, second)] == [(3, "1\n"), (0, "2\n")]


@pytest.mark.fault("SBX-16")
async def test_quotes_and_spaces_in_names_and_values_are_only_letters(box):
    path = "/tmp/a b'c$(x)"
    await box.write_file(f"{path}/-n", b"text")
    assert await box.read_file(f"{path}/-n") == b"text"
    result = await box.exec('pwd; printf %s "$V"; cd / && pwd', timeout=5, cwd=path, env={"V": "1\n'2\""})
    assert result.stdout == f"{path}\n1\n'2\"/\n"


@pytest.mark.fault("SBX-18")
@pytest.mark.fault("LOOP-12")
async def test_nothing_of_the_host_s_environment_is_inside(backend, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-host")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://policy.internal")
    box = await backend.start(SandboxSpec())
    script = "which python3; env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; ls -a / /home /root ~"
    text = (await box.exec(script, timeout=5)).stdout
    for secret in ("sk-secret", "policy.internal", "VIRTUAL_ENV", "PYTHONPATH", os.path.dirname(sys.executable)):
        assert secret not in text
    assert text.startswith("/usr/")


@pytest.mark.fault("SBX-18")
async def test_folders_of_two_runs_are_apart_and_private(make_backend):
    one, two = make_backend(isolation="process"), make_backend(isolation="process")
    boxes = [await one.start(SandboxSpec()), await two.start(SandboxSpec())]
    folders = [(await box.exec("pwd", timeout=5)).stdout.strip() for box in boxes]
    assert folders[0] != folders[1]
    assert Path(folders[0]).parent.parent.stat().st_mode & 0o077 == 0
    for backend in (one, two):
        await backend.aclose()
    assert not Path(folders[0]).exists()


@pytest.mark.fault("SBX-21")
async def test_exit_codes_say_what_happened(backend, box):
    result = await box.exec("exit 124", timeout=5)
    assert (result.exit_code, result.timed_out) == (124, False)
    assert (await box.exec("kill -9 $$", timeout=5)).exit_code == 137
    running = asyncio.create_task(box.exec("sleep 60", timeout=60))
    await asyncio.sleep(0.3)
    await backend.delete(box.id)
    with pytest.raises(SandboxLost):
        await running


@pytest.mark.fault("SBX-21")
async def test_out_of_memory_is_told_apart(backend):
    box = await backend.start(SandboxSpec(memory_mb=64))
    result = await box.exec(["python3", "-c", "x = bytearray(2_000_000_000)"], timeout=30)
    assert result.exit_code != 0
    assert result.oom == (result.exit_code == 137)
    assert (await box.exec("echo on", timeout=5)).stdout == "on\n"


@pytest.mark.fault("SBX-22")
@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "10", True])
async def test_senseless_timeouts_are_refused(box, timeout):
    with pytest.raises(ValueError, match="timeout must be"):
        await box.exec("true", timeout=timeout)


@pytest.mark.fault("LOOP-14")
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.2])
async def test_a_cancelled_command_is_ended(box, delay, processes):
    mark = f"sleep {random.randint(100_000, 999_999)}"
    task = asyncio.create_task(box.exec(f"setsid {mark} & {mark}", timeout=100))
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not processes(mark.replace(" ", "\0")):
            break
        await asyncio.sleep(0.05)
    assert not processes(mark.replace(" ", "\0"))
    assert (await box.exec("echo on", timeout=5)).stdout == "on\n"


@pytest.mark.fault("SBX-09")
@pytest.mark.parametrize("times", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_cancel_at_any_moment_leaves_no_process(backend, times, processes, tmp_path):
    async def life(mark: str):
        box = await backend.start(SandboxSpec(env={"MARK": mark}))
        try:
            await box.exec(f"setsid sleep {mark} & sleep {mark}", timeout=100)
        finally:
            await box.close()

    await (await backend.start(SandboxSpec())).close()
    chance = random.Random(7)
    for _ in range(times):
        mark = str(chance.randint(10**8, 10**9))
        task = asyncio.create_task(life(mark))
        await asyncio.sleep(chance.random() * 0.25)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 30)
        assert not processes(mark)
    assert list(await backend.list({})) == []
    assert list((tmp_path / "state").glob("local-*")) == []


DYING = """
import asyncio, sys
from rlcore.sandbox_tools import ownership
from rlcore.types import SandboxSpec
from rlcore_local.backend import LocalBackend

async def main():
    backend = LocalBackend(LocalBackend.Config(state_dir=sys.argv[1]))
    boxes = await asyncio.gather(*(backend.start(SandboxSpec(labels=ownership("dies"))) for _ in range(16)))
    for box in boxes:
        await box.exec(f"setsid sleep {sys.argv[2]} & echo on", timeout=20)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_sigkill_of_the_trainer_leaves_nothing_and_the_sweeper_finds_nothing(backend, tmp_path, processes):
    mark = str(random.randint(10**8, 10**9))
    foreign = await backend.start(SandboxSpec(labels={"launcher": "somebody"}))
    trainer = subprocess.Popen(
        [sys.executable, "-c", DYING, str(tmp_path / "state"), mark], stdout=subprocess.PIPE, text=True
    )
    assert await asyncio.to_thread(trainer.stdout.readline) == "ready\n"
    assert len(await backend.list({"run": "dies"})) == 16
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    for _ in range(100):
        if not processes(mark):
            break
        await asyncio.sleep(0.05)
    assert not processes(mark)
    for info in await backend.list({"run": "dies"}):
        await backend.delete(info.id)
    assert [info.id for info in await backend.list({})] == [foreign.id]
    assert await foreign.alive()


STARTING = """
import asyncio, sys
from rlcore.types import SandboxSpec
from rlcore_local.backend import LocalBackend

async def main():
    backend = LocalBackend(LocalBackend.Config(state_dir=sys.argv[1]))
    await (await backend.start(SandboxSpec())).close()
    print("begins", flush=True)
    while True:
        boxes = await asyncio.gather(*(backend.start(SandboxSpec(workdir="/" + sys.argv[2])) for _ in range(4)))
        await asyncio.gather(*(box.close() for box in boxes))

asyncio.run(main())
"""


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.slow)])
async def test_sigkill_while_sandboxes_start_leaves_no_process(tmp_path, processes, times):
    chance = random.Random(times)
    for _ in range(times):
        trainer = subprocess.Popen(
            [sys.executable, "-c", STARTING, str(tmp_path / "state"), "w"], stdout=subprocess.PIPE, text=True
        )
        assert await asyncio.to_thread(trainer.stdout.readline) == "begins\n"
        before = set(processes("--info-fd"))
        await asyncio.sleep(chance.random() * 0.3)
        ours = {pid for pid in processes("--info-fd") if session_of(pid) not in map(session_of, before)}
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        for _ in range(100):
            if not any(Path(f"/proc/{pid}").exists() for pid in ours):
                break
            await asyncio.sleep(0.05)
        assert not [pid for pid in ours if Path(f"/proc/{pid}").exists()]


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


# --- attacks ----------------------------------------------------------------------------------------------------------


async def test_process_1_cannot_be_killed_stopped_or_read_from_inside(box):
    script = "kill -9 1; kill -STOP 1; kill -9 -1; cat /proc/1/environ /proc/1/fd/1 2>&1; echo x > /proc/1/fd/3; ls -l /proc/1/fd"
    result = await box.exec(script, timeout=5)
    assert "denied" in result.stdout + result.stderr
    assert (await box.exec("echo on", timeout=5)).stdout == "on\n"


async def test_a_command_whose_parent_cannot_be_killed_does_not_escape_its_timeout(box, processes):
    mark = str(random.randint(10**8, 10**9))
    script = f"kill -9 $PPID; kill -STOP $PPID; (env -i setsid sleep {mark} &); sleep {mark}"
    assert (await box.exec(script, timeout=1)).timed_out
    assert not processes(mark)
    assert (await box.exec("echo on", timeout=5)).stdout == "on\n"


@pytest.mark.parametrize(
    "forged", [r'{"id": 2, "code": 0, "size": 0}\n', r"\000\n\000", r'{"id": 0, "size": 99999999999}\n', r"[]\n"]
)
async def test_an_answer_cannot_be_forged_from_a_command(box, forged):
    result = await box.exec(f"for fd in 3 4 5 6 7 8; do printf '{forged}' >&$fd; done 2>/dev/null; exit 5", timeout=5)
    assert result.exit_code == 5


async def test_a_fork_bomb_is_bounded_and_ended(box):
    result = await box.exec(":(){ :|:& };: ; sleep 30", timeout=2, max_output=1000)
    assert result.timed_out
    assert (await box.exec("echo on", timeout=10)).stdout == "on\n"


async def test_the_disk_cannot_be_filled(backend):
    box = await backend.start(SandboxSpec(disk_mb=8, memory_mb=256))
    for place in ("/workspace", "/tmp", "/dev/shm", "/var/tmp", "~"):
        script = f"cd {place} && for i in 1 2 3; do head -c 6000000 /dev/zero > f$i; done; rm -f f?"
        result = await box.exec(script, timeout=20)
        assert "No space left" in result.stderr or "File too large" in result.stderr, (place, result)
    assert (await box.exec("echo x > /dev/f", timeout=5)).exit_code != 0
    with pytest.raises(OSError, match="No space left"):
        await box.write_file("/workspace/large", bytes(20_000_000))
    assert (await box.exec("ls -A /workspace", timeout=5)).stdout == ""


async def test_the_host_s_files_are_not_there(box, tmp_path):
    (tmp_path / "host").write_text("of the host")
    script = f"cat {tmp_path}/host; ls -A /home /root /work /mnt /etc/shadow /var/lib; cat /etc/passwd; echo x > /usr/x"
    result = await box.exec(script, timeout=5)
    assert "of the host" not in result.stdout
    assert "Read-only" in result.stderr
    users = [line.split(":")[0] for line in result.stdout.splitlines() if line.count(":") == 6]
    assert sorted(users) == ["agent", "nobody", "root"]


async def test_no_privileges_are_to_be_had(box):
    script = "grep -E '^Cap(Eff|Prm|Bnd)|NoNewPrivs' /proc/self/status; unshare -U true; mount -t tmpfs x /tmp; id -u"
    result = await box.exec(script, timeout=5)
    assert result.stdout.split() == [
        *("CapPrm:", "0" * 16, "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"),
        "1000",
    ]
    assert "unshare" in result.stderr
    assert "mount" in result.stderr


async def test_the_network_is_not_there_and_the_host_s_ports_are_not(box):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ask = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    assert "refused" in (await box.exec(["python3", "-c", ask], timeout=5)).stderr
    ask = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
    assert "unreachable" in (await box.exec(["python3", "-c", ask], timeout=5)).stderr
    server.close()
    await server.wait_closed()


async def test_with_network_the_host_s_network_is_there(backend):
    box = await backend.start(SandboxSpec(network=True))
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ask = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('yes')"
    assert (await box.exec(["python3", "-c", ask], timeout=5)).stdout == "yes\n"
    server.close()
    await server.wait_closed()


async def test_a_sparse_folder_does_not_fill_the_host(make_backend, tmp_path):
    backend = make_backend(max_download_mb=1)
    box = await backend.start(SandboxSpec())
    await box.exec("mkdir d; truncate -s 100M d/sparse", timeout=5)
    with pytest.raises(ValueError, match="larger than"):
        await box.download_dir("/workspace/d", tmp_path / "out")
    assert (await box.exec("echo on", timeout=5)).stdout == "on\n"
    await backend.aclose()


async def test_a_pipe_or_device_in_the_way_blocks_nothing(box):
    await box.exec(
        "mkfifo /workspace/pipe; mkdir d; mkfifo d/pipe; ln -s /dev/zero d/zero; ln -s /dev/zero zero", timeout=5
    )
    for path in ("/workspace/pipe", "/workspace/zero"):
        with pytest.raises(PermissionError):
            await asyncio.wait_for(box.read_file(path), 5)
        with pytest.raises(PermissionError):
            await asyncio.wait_for(box.write_file(path, b"x"), 5)


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_no_bubblewrap_is_an_error_that_says_what_to_do(make_backend):
    with pytest.raises(ConfigError, match=r"not installed: install it .*apt-get install bubblewrap.*isolation"):
        await make_backend(bwrap="no-such-bwrap").start(SandboxSpec())


async def test_a_bubblewrap_that_cannot_run_is_an_error_with_its_reason(make_backend, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot run here \(.*(No permissions|denied).*user namespaces"):
        await make_backend(bwrap=str(fake)).start(SandboxSpec())


@pytest.mark.parametrize("spec", [SandboxSpec(image="debian:12"), SandboxSpec(build_context="/x")])
async def test_an_image_is_refused_unless_told_otherwise(make_backend, spec):
    with pytest.raises(ConfigError, match=r"no images.*ignore_image"):
        await make_backend().start(spec)
    box = await make_backend(ignore_image=True).start(spec)
    await box.close()


async def test_another_user_is_refused_and_the_spec_s_user_is_taken(backend):
    box = await backend.start(SandboxSpec(user=0))
    assert (await box.exec("id -u; echo $HOME; touch /root/x", timeout=5, user="root")).stdout == "0\n/root\n"
    with pytest.raises(ConfigError, match="one user"):
        await box.exec("id", timeout=5, user=1000)


async def test_process_isolation_says_what_it_does_not_isolate(make_backend, caplog):
    backend = make_backend(isolation="process")
    box = await backend.start(SandboxSpec())
    assert "NOT isolated" in caplog.text
    await box.write_file("/tests/a", b"inside")
    assert (await box.exec('cat "$RLCORE_SANDBOX/tests/a"', timeout=5)).stdout == "inside"
    with pytest.raises(PermissionError):
        await box.write_file("/etc/rlcore-was-here", b"")
    result = await box.exec("setsid sleep 987654 & sleep 60", timeout=0.5)
    assert result.timed_out
    await backend.aclose()


async def test_a_state_folder_of_others_is_refused(make_backend, tmp_path):
    (tmp_path / "state").mkdir(mode=0o777)
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0700"):
        await make_backend().start(SandboxSpec())
