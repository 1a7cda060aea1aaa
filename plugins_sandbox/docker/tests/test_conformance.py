"""The whole contract on a real engine."""

import pytest
from rlcore.testing.sandbox import SandboxConformance


class TestDocker(SandboxConformance):
    @pytest.fixture(autouse=True)
    def engine(self, make_backend):
        self.make_backend = make_backend
