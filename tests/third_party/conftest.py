"""Foreign distributions, built into wheels and installed by pip into an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOREIGN = ("busybox-jail", "noting-sandbox", "root-tis", "soft-clip", "vowels-env")

collect_ignore_glob = ["*/tests/*"]  # they run where the distributions are installed


class Environment:
    """A virtual environment that also sees the packages of the one that runs the tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        _run(sys.executable, "-m", "venv", "--without-pip", str(path))
        ours = sysconfig.get_path("purelib")
        [site] = path.glob("lib/python3.*/site-packages")
        (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def install(self, *requirements: str | Path) -> None:
        """Install with pip, which finds what is required among the packages that are there."""
        options = ("-q", "--no-index", "--no-build-isolation")
        _run(sys.executable, "-m", "pip", "--python", self.python, "install", *options, *requirements)

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, timeout: float = 180, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python."""
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            cwd=cwd or self.path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def rlcore(self, *arguments: str | Path, cwd: Path | None = None, timeout: float = 180) -> str:
        """Run ``rlcore`` to a good end and return what it printed."""
        done = self.run("-m", "rlcore", *arguments, cwd=cwd, timeout=timeout)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with every foreign distribution installed from its wheel."""
    wheels = tmp_path_factory.mktemp("wheels")
    options = ("-q", "--no-build-isolation", "--no-deps", "--no-index", "-w")
    _run(sys.executable, "-m", "pip", "wheel", *options, wheels, *(HERE / name for name in FOREIGN))
    environment = Environment(tmp_path_factory.mktemp("foreign") / "venv")
    environment.install(*sorted(wheels.glob("*.whl")))
    return environment


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
