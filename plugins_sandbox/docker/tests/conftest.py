"""A private Docker engine for the tests: own socket, own data, nothing of the host's network is touched.

Images come from busybox, not from a registry. If the engine cannot start, the tests fail with its log, unless
``SKIP_DOCKER=1``.
"""

import contextlib
import fcntl
import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import docker
import pytest

BUSYBOX = "rlcore-test-busybox:1"


def pytest_collection_modifyitems(items):
    if os.environ.get("SKIP_DOCKER") == "1":
        for item in items:
            if Path(__file__).parent in Path(item.fspath).parents:
                item.add_marker(pytest.mark.skip(reason="SKIP_DOCKER=1"))


@pytest.fixture(scope="session")
def docker_host():
    """Address of the engine; one for all workers of a test run, ended by the last."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    home = Path(tempfile.gettempdir()) / f"rlcore-dockerd-{run}"
    home.mkdir(exist_ok=True)
    with locked(f"{home}.lock"):
        users = home / "users"
        users.mkdir(exist_ok=True)
        if not (home / "docker.pid").exists():
            start(home)
        (users / str(os.getpid())).touch()
    yield f"unix://{home}/docker.sock"
    with locked(f"{home}.lock"):
        (users / str(os.getpid())).unlink()
        if not any(users.iterdir()):
            stop(home)


@contextlib.contextmanager
def locked(path: str):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start(home: Path) -> None:
    if shutil.which("dockerd") is None:
        pytest.fail("dockerd is not installed: apt-get install docker.io busybox-static (or set SKIP_DOCKER=1)")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("dockerd", f"--data-root={home}/data", f"--exec-root={home}/exec", f"--pidfile={home}/docker.pid"),
                *("-H", f"unix://{home}/docker.sock", "--iptables=false", "--ip6tables=false", "--ip-masq=false"),
                *("--ip-forward=false", "--bridge=none"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.returncode = 0  # it outlives this worker: the last one ends it
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as trial:
            if trial.connect_ex(f"{home}/docker.sock") != 0:
                time.sleep(0.1)
                continue
        client = docker.DockerClient(f"unix://{home}/docker.sock", timeout=60)
        client.api.import_image_from_data(busybox(), repository=BUSYBOX.split(":")[0], tag=BUSYBOX.split(":")[1])
        client.close()
        return
    pytest.fail(f"dockerd did not start: {(home / 'log').read_text()[-2000:]}")


def stop(home: Path) -> None:
    pid = int((home / "docker.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    subprocess.run(["umount", f"{home}/exec/netns/default"], capture_output=True)
    shutil.rmtree(home, ignore_errors=True)


def busybox() -> bytes:
    """A root file system of one static program and its links."""
    program = Path("/bin/busybox").read_bytes()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder in ("bin", "etc", "root", "tmp", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        files = {"bin/busybox": program, "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        for applet in subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True).stdout.split():
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    return out.getvalue()


@pytest.fixture
def make_backend(docker_host, monkeypatch):
    """Backends of the private engine."""
    from rlcore_docker.backend import DockerBackend

    monkeypatch.setenv("DOCKER_HOST", docker_host)

    def make(**options):
        return DockerBackend(DockerBackend.Config(**{"image": BUSYBOX, **options}))

    return make


@pytest.fixture
async def backend(make_backend):
    one = make_backend()
    yield one
    await one.aclose()


@pytest.fixture
def client(docker_host):
    one = docker.DockerClient(docker_host)
    yield one
    one.close()
