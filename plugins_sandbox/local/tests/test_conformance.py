"""The whole contract, as the user who runs the tests and as one without privileges."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from rlcore.testing.sandbox import BEHAVIOURS, SandboxConformance
from rlcore_local.backend import LocalBackend

AS_ANOTHER_USER = """
import asyncio, sys
from rlcore.testing.sandbox import run_kit
from rlcore.types import SandboxSpec
from rlcore_local.backend import LocalBackend
backend = LocalBackend(LocalBackend.Config(state_dir=sys.argv[1] + "/state"))
outcomes = asyncio.run(run_kit(backend, SandboxSpec(), only=sys.argv[2].split(",") if sys.argv[2] else None))
for one in outcomes:
    print(one.status, one.name, one.detail)
"""
USER = 54321
QUICK = (
    "exit_codes,large_output,stdin_is_closed,upload,download_stays_inside,timeout_kills_daemons,network_is_off,"
    "memory_limit,disk_limit,lost_is_not_failed,list_by_label,cancelled_start"
)


class TestLocal(SandboxConformance):
    @pytest.fixture(autouse=True)
    def own_state(self, tmp_path):
        self.state = str(tmp_path / "state")

    def make_backend(self):
        return LocalBackend(LocalBackend.Config(state_dir=self.state))


@pytest.fixture
def as_another_user():
    """Run the kit in a process of an unprivileged user, with an interpreter that this user may read."""
    folder = tempfile.mkdtemp(prefix="rlcore-test-")  # pytest's own folders are closed to other users
    os.chown(folder, USER, USER)
    here = f"python{sys.version_info.major}.{sys.version_info.minor}"
    environ = {
        "HOME": "/nonexistent",
        "TMPDIR": folder,
        "PYTHONPATH": ":".join(sys.path[1:]),
        "PATH": os.environ["PATH"],
    }

    def run(*arguments: str):
        reasons = []
        for python in (sys.executable, f"/usr/bin/{here}", f"/usr/local/bin/{here}"):
            try:
                done = subprocess.run(
                    [python, *arguments],
                    capture_output=True,
                    text=True,
                    timeout=110,
                    user=USER,
                    group=USER,
                    extra_groups=[],
                    env=environ,
                    cwd="/",
                )
            except OSError as error:
                reasons.append(f"{python}: {error}")
                continue
            if done.returncode == 0:
                return done
            reasons.append(f"{python}: {done.stderr}")
        raise AssertionError("\n".join(reasons))

    yield lambda only: run("-c", AS_ANOTHER_USER, folder, only)
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="the tests run without privileges already")
@pytest.mark.parametrize("only", [QUICK, pytest.param("", marks=pytest.mark.slow)], ids=["quick", "all"])
def test_the_kit_passes_without_privileges(as_another_user, only):
    done = as_another_user(only)
    lines = done.stdout.splitlines()
    assert len(lines) == (len(QUICK.split(",")) if only else len(BEHAVIOURS))
    assert [line for line in lines if not line.startswith(("pass", "gap"))] == [], done.stderr
