"""Writes a new plugin: a complete distribution around one of the classes in :mod:`rlcore.testing.skeletons`."""

from __future__ import annotations

import keyword
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rlcore import __version__
from rlcore.errors import ConfigError
from rlcore.plugins import KINDS, canonical, nearest

__all__ = ["Skeleton", "skeleton_kinds", "write_skeleton"]

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.24"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "{article} {kind} for rlcore."
readme = "README.md"
requires-python = ">=3.11"
dependencies = [{requires}]

[project.optional-dependencies]
test = [{test_requires}]

[project.entry-points.rlcore]
{name} = "{package}.plugin"

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]
"""

_PLUGIN = '''\
"""What {name} offers. This module is imported at every start of rlcore, so it imports nothing heavy."""

from rlcore import hookimpl

RLCORE_HOOK_API = 1


@hookimpl
def {hook}(register):
    """Names, and where their classes are; a class is imported when its name is used."""
    register("{name}", "{package}.{module}:{cls}")
'''

_README = """\
# {name}

{article} {kind} for rlcore.

    pip install -e .
    rlcore plugins check {name}
    rlcore train RECIPE --set {kind}.name={name}

Its options are the fields of `{cls}.Config` in `src/{package}/{module}.py`; `rlcore plugins show {name}` lists them.
The tests show that it keeps the contract of `rlcore.protocols`: `pytest`.
"""


_REQUIRES = {"policy": ["httpx>=0.27"]}
_TEST_REQUIRES = {"correction": ["torch"], "loss": ["torch"]}
"""What skeletons of some kinds need beyond the others."""


class Skeleton(NamedTuple):
    """Where it was written, and the name that the configuration uses."""

    directory: Path
    offer: str


def skeleton_kinds() -> list[str]:
    """The kinds that a skeleton exists for."""
    there = {path.name for path in files("rlcore.testing.skeletons").iterdir()}
    return [kind for kind in KINDS if f"{kind}.py" in there]


def write_skeleton(name: str, kind: str, directory: Path) -> Skeleton:
    """Write the distribution ``name`` with one class of ``kind``, an entry point and a test that passes as it is.

    Raises:
        ConfigError: no skeleton of that kind, or the directory holds something.
        PluginError: ``name`` cannot be the name of a plugin.
    """
    if kind not in skeleton_kinds():
        raise ConfigError(f"--kind {kind}: no skeleton of that kind{nearest(kind, skeleton_kinds())}")
    name, _ = canonical(name)
    package = name.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package):
        raise ConfigError(f"{name!r} cannot be a Python package: begin it with a letter")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not empty: choose another place with --dir")
    words = {
        "name": name,
        "kind": kind,
        "article": "An" if kind[0] in "aeiou" else "A",
        "requires": _quoted(f"rlcore>={__version__}", "pydantic>=2.7", *_REQUIRES.get(kind, ())),
        "test_requires": _quoted("rlcore[testing]", *_TEST_REQUIRES.get(kind, ())),
        "package": package,
        "module": kind if kind != package else f"{kind}_",
        "cls": "".join(part.capitalize() for part in package.split("_")),
        "hook": KINDS[kind],
    }
    source = directory / "src" / package
    _write(directory / "pyproject.toml", _PYPROJECT.format(**words))
    _write(directory / "README.md", _README.format(**words))
    _write(source / "__init__.py", f'"""{words["article"]} {kind} for rlcore."""\n')
    _write(source / "py.typed", "")
    _write(source / "plugin.py", _PLUGIN.format(**words))
    _write(source / f"{words['module']}.py", _renamed(f"{kind}.py", kind, words))
    _write(directory / "tests" / f"test_{kind}.py", _renamed(f"check_{kind}.py", kind, words))
    return Skeleton(directory, name)


def _quoted(*requirements: str) -> str:
    return ", ".join(f'"{requirement}"' for requirement in requirements)


def _renamed(file: str, kind: str, words: dict[str, str]) -> str:
    text = files("rlcore.testing.skeletons").joinpath(file).read_text(encoding="utf-8")
    text = text.replace(f"rlcore.testing.skeletons.{kind}", f"{words['package']}.{words['module']}")
    return text.replace("Skeleton", words["cls"])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
