"""Two fake nodes: network namespaces on one wire, and stubs of Slurm's commands that run a step in one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

RAY = "ray>=2.40,<3"
SRUN = """#!/bin/bash
for word in "$@"; do
  case $word in
    --nodelist=*) node=${word#--nodelist=}; shift;;
    --*) shift;;
    *) break;;
  esac
done
case " $DOWN " in *" $node "*) exec sleep 1000;; esac
exec ip netns exec "$PREFIX-$node" "$@"
"""


@dataclass
class FakeSlurm:
    """``nodes`` is what ``scontrol show hostnames`` says; each has 10.77.0.N on a shared wire."""

    bin: Path
    prefix: str
    nodes: tuple[str, ...] = ("n0", "n1")

    def run(self, script: str, *, timeout: float, down: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run an sbatch script as Slurm would: on the first node's machine, with the job's variables."""
        path = self.bin / "job.sh"
        path.write_text(script)
        environment = {
            **os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "PREFIX": self.prefix, "DOWN": down,
            "SLURM_JOB_NODELIST": "n[0-1]", "RAY_memory_monitor_refresh_ms": "0", **env,
        }  # fmt: skip
        child = subprocess.Popen(
            ["bash", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            out, err = child.communicate()
            pytest.fail(f"the job did not end within {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess([], child.returncode, out, err)


@pytest.fixture(scope="session")
def ray_python() -> Path:
    """An interpreter of its own that has Ray, made once: Ray's dependencies stay out of the tests' environment."""
    folder = Path.home() / ".cache" / "rlcore-tests" / f"ray-{sys.version_info.major}.{sys.version_info.minor}"
    made = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(made), "-m", "pip", "--disable-pip-version-check", "-q", "install", RAY]
        subprocess.run(install, check=True, timeout=600)
        (folder / "complete").touch()
    return made


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    prefix = f"rl{uuid.uuid4().hex[:6]}"
    folder = tmp_path / "bin"
    folder.mkdir()
    made = FakeSlurm(folder, prefix)
    for name, text in {
        "scontrol": "#!/bin/sh\nprintf 'n0\\nn1\\n'\n",
        "srun": SRUN,
        "sbatch": f"#!/bin/sh\ncat > {tmp_path}/submitted\necho Submitted batch job 7\nexit ${{SBATCH_STATUS:-0}}\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    if shutil.which("ip") is None:
        pytest.fail("the command ip is missing: apt-get install iproute2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    names = [f"{prefix}-{node}" for node in made.nodes]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            f"{prefix}a",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            f"{prefix}b",
            "netns",
            names[1],
        )
        for name, side, host in zip(names, "ab", (1, 2), strict=True):
            ip("-n", name, "addr", "add", f"10.77.0.{host}/24", "dev", f"{prefix}{side}")
            ip("-n", name, "link", "set", f"{prefix}{side}", "up")
        yield made
    finally:
        for name in names:
            pids = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            ).stdout.split()
            for pid in pids:  # only what this test started lives in its namespaces
                subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
