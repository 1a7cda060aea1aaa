"""The whole contract, through the real SDK against a server where commands really run."""

import pytest
from rlcore.testing.sandbox import SandboxConformance


class TestDaytona(SandboxConformance):
    @pytest.fixture(autouse=True)
    def provider(self, make_backend):
        self.make_backend = make_backend
