"""The whole contract, through the real SDK against a server where commands really run."""

import pytest
from rlcore.testing.sandbox import SandboxConformance


class TestModal(SandboxConformance):
    @pytest.fixture(autouse=True)
    def through_the_sdk(self, make_backend):
        self.make_backend = make_backend
