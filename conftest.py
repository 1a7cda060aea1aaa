"""What every test of the workspace shares."""

import os

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
