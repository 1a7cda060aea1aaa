"""What ``manifest.json`` says: everything that one needs to know to make a run again, and no secret."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import rlcore

__all__ = ["manifest"]

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "pluggy", "openai", "ray")


def manifest(recipe: str | None, config: Mapping[str, Any], plugins: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run that starts now.

    Args:
        recipe: its name.
        config: the resolved configuration; secrets in it are references.
        plugins: the plugin set with its hash.
    """
    return {
        "rlcore": rlcore.__version__,
        "hook_api": rlcore.HOOK_API,
        "recipe": recipe,
        "config": config,
        "plugins": plugins,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit of the working directory and whether it differs; ``None`` outside a repository."""
    commit = _output("git", "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_output("git", "status", "--porcelain", "--untracked-files=no"))}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
