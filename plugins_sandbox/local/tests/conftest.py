"""A local backend whose records are its own, and sandboxes that are closed."""

import contextlib
import os
from pathlib import Path

import pytest
from rlcore.types import SandboxSpec
from rlcore_local.backend import LocalBackend


@pytest.fixture
def make_backend(tmp_path):
    """Backends of one state folder: as if each were of another process."""

    def make(**options):
        return LocalBackend(LocalBackend.Config(state_dir=str(tmp_path / "state"), **options))

    return make


@pytest.fixture
async def backend(make_backend):
    one = make_backend()
    yield one
    await one.aclose()


@pytest.fixture
async def box(backend):
    return await backend.start(SandboxSpec())


@pytest.fixture
def processes():
    """Pids on this machine whose command line holds a text."""

    def find(text: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if text.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found

    return find
