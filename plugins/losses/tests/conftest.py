"""What the tests of the losses share: one thread, and the hypothesis profile that the environment names."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("full", max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is shared."""
    torch.set_num_threads(1)
