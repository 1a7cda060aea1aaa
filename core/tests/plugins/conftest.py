"""Installed distributions that exist for one test."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, first on the path of this process; its modules are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("RLCORE_PLUGINS", raising=False)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """Install a distribution: its entry points and its modules."""

    def install(
        name: str, entry_points: Mapping[str, str], modules: Mapping[str, str] | None = None, version: str = "1.0"
    ) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not this\n")
        lines = "\n".join(f"{key} = {value}" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[rlcore]\n{lines}\n")
        for module, source in (modules or {}).items():
            path = site / (module.replace(".", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(source))

    return install


@pytest.fixture
def rlcore(site: Path) -> Command:
    """Run ``rlcore`` as a user does, in a process of its own that sees the installed distributions."""

    def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlcore", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=cwd or site.parent,
            env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "80", **environment},
        )

    return run
