"""What each distribution says that it needs is what its code imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEMBERS = [path.parent for pattern in ("core", "plugins*/*") for path in ROOT.glob(f"{pattern}/pyproject.toml")]


def name_of(requirement: str) -> str:
    """``rlcore-engine`` of ``rlcore_engine[torch]>=1``."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def imported(member: Path) -> Iterator[str]:
    """The distributions that the sources of one import, at the top of a module or anywhere in it."""
    distributions = packages_distributions()
    for path in (member / "src").rglob("*.py"):
        if "skeletons" in path.parts:
            continue  # texts of `rlcore plugins new`, with requirements of their own
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for module in {name.partition(".")[0] for name in modules} - sys.stdlib_module_names:
                yield from map(name_of, distributions.get(module, [module]))


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_what_is_imported_is_required_and_what_is_required_is_imported(member: Path) -> None:
    """But plugins that a recipe names in its configuration, and what an extra brings for programs that are started."""
    project: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = set(map(name_of, project["dependencies"]))
    extra = {name_of(one) for group in project.get("optional-dependencies", {}).values() for one in group}
    found = set(imported(member)) - {project["name"]}
    ours = {name_of(tomllib.loads((one / "pyproject.toml").read_text())["project"]["name"]) for one in MEMBERS}
    assert not found - required - extra, "imported and not required"
    assert not required - found - ours, "required and not imported"
