"""The jail keeps the contract."""

import pytest
from busybox_jail.backend import JailBackend
from rlcore.testing import SandboxConformance


class TestJail(SandboxConformance):
    lacks = {"killing_everything": "not tried without limits"}

    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path):
        self.folder = str(tmp_path)

    def make_backend(self):
        return JailBackend(JailBackend.Config(folder=self.folder))
