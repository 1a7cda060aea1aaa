"""The start stays light: nothing heavy is imported before it is used, and modules import only what is below them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = [
    "torch",
    "ray",
    "openai",
    "transformers",
    "numpy",
    "pyarrow",
    "pydantic",
    "rich",
    "matplotlib",
    "fastapi",
    "httpx",
]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import rlcore", ()),
        ("import rlcore.plugins, rlcore.hookspecs, rlcore.protocols, rlcore.types, rlcore.errors", ()),
        ("from rlcore.plugins import load_plugins; load_plugins()", ()),
        ("from rlcore.cli import main; main(['--version'])", ()),
        ("from rlcore.cli import main; main(['--help'])", ()),
        ("from rlcore.cli import main; main(['plugins'])", ("pydantic",)),
        ("from rlcore.cli import main; main(['plugins', 'list', '--json'])", ("pydantic",)),
        ("from rlcore.cli import main; main(['config', 'schema'])", ("pydantic",)),
        ("from rlcore.cli import main; main(['train', '--help'])", ("pydantic",)),
    ],
)
def test_nothing_heavy_is_loaded(code: str, allowed: tuple[str, ...]) -> None:
    probe = f"import atexit, json, sys; atexit.register(lambda: print(json.dumps([m for m in {HEAVY} if m in sys.modules]), file=sys.stderr))"
    environment = {**os.environ, "COVERAGE_PROCESS_START": ""}
    environment.pop("RLCORE_PLUGINS", None)
    done = subprocess.run(
        [sys.executable, "-c", f"{probe}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert set(json.loads(done.stderr.splitlines()[-1])) <= set(allowed)


def test_the_layers_of_the_core_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
