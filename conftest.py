"""What every test of the workspace shares."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# a loaded machine is slow, which is no fault of the code: speed is measured in benchmarks/
settings.register_profile("default", deadline=None)
settings.register_profile("full", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"


@pytest.fixture
def processes_with() -> Callable[[str], list[int]]:
    """Ids of the live processes that have a text in their environment: what a test has left running."""

    def found(text: str) -> list[int]:
        ids = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if text.encode() in (process / "environ").read_bytes():
                    ids.append(int(process.name))
            except OSError:  # it has ended meanwhile, or is another user's
                continue
        return ids

    return found
