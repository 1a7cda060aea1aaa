"""As a user installs it: wheels of every distribution, an empty environment without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MEMBERS = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins*/*/pyproject.toml"))]
PROBE = """
import json, resource, sys
import rlcore.cli
try:
    rlcore.cli.main(json.loads(sys.argv[1]))
except SystemExit as ended:
    status = ended.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([status or 0, used.ru_utime + used.ru_stime, [m for m in ("torch", "ray") if m in sys.modules]]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has glm52-plugin from a folder of wheels, and what it depends on, and nothing else."""
    wheels = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), *map(str, MEMBERS)], check=True, timeout=600)
    assert len(list(wheels.glob("*.whl"))) == len(MEMBERS)
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    made = folder / "bin" / "python"
    install = [str(made), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--find-links", str(wheels)]
    subprocess.run([*install, "glm52-plugin"], check=True, timeout=900)
    return made


@pytest.mark.slow
def test_the_environment_has_no_torch(python: Path) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    names = {entry["name"].lower() for entry in json.loads(done.stdout)}
    assert {"glm52-plugin", "rlcore", "rlcore-launchers"} <= names
    assert not names & {"torch", "ray", "sglang", "megatron-core"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["plugins"], 0, "glm52-plugin 0.1.0  ok"),
        (["train", "--plugin", "glm52", "--dry-run"], 0, "sglang.launch_server"),
        (["plan", "glm52"], 0, "743,377,019,904"),
        (["plan", "glm52", "--suggest"], 0, "layouts that fit"),
        (["train", "--plugin", "glm52", "--preflight"], 2, "pip install rlcore-megatron"),
        (["train", "--plugin", "glm52"], 2, "pip install rlcore-megatron"),
        (["launch", "glm52", "--launcher", "slurm"], 0, "#SBATCH --nodes=16"),
        (["config", "show", "glm52"], 0, "trainer.split"),
    ],
)
def test_the_commands_work_and_are_light(
    python: Path, tmp_path: Path, words: list[str], status: int, shown: str
) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    line = [str(python), "-c", PROBE, json.dumps(words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    code, seconds, heavy = json.loads(done.stderr.strip().splitlines()[-1])
    assert code == status, done.stderr
    assert shown in done.stdout + done.stderr
    assert seconds < 2
    assert not heavy
    if words[:2] == ["train", "--plugin"]:
        assert not (tmp_path / "runs").exists()
