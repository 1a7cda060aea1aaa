"""Writes the bundled task set: Harbor task folders, one per instance, from a seed and a pool of words."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlcore.errors import ConfigError

from rlcore_tbench2.bundled.kinds import KINDS, TRAINED, Instance, Kind, Words
from rlcore_tbench2.bundled.words import POOLS

__all__ = ["write_tasks"]

FORMAT = 3
"""Raised whenever the same arguments would give other folders, so that old sets on disk are written again."""

MANIFEST = "bundled.json"


def write_tasks(
    folder: Path | str,
    *,
    split: str = "train",
    kinds: Sequence[str] | None = None,
    per_kind: int = 40,
    seed: int = 0,
    words: Sequence[str] | None = None,
    demo_words: Sequence[str] | None = None,
    examples: int = 2,
    base_image: str = "debian:bookworm-slim",
) -> Path:
    """Write ``len(kinds) * per_kind`` tasks as ``folder/<kind>-<number>`` and return ``folder``.

    The same arguments give the same bytes; a folder that already holds them is left alone. Written beside the target
    and moved into place whole, so a reader never sees half a set.

    Args:
        folder: the target. It must be absent, empty, or an earlier set of this generator, which is replaced.
        split: name of the pool of words: ``train``, ``heldout`` or ``fresh``.
        kinds: names of kinds; default: the trained ones.
        per_kind: tasks of each kind, no two alike.
        seed: everything that is drawn follows from it, the split, the kind and the pools.
        words: a pool in place of the split's own.
        demo_words: a pool in place of ``demo`` for the solved examples.
        examples: solved examples of the same kind in each prompt.
        base_image: what the Dockerfiles start from, for backends that build images.

    Raises:
        ConfigError: an unknown split or kind, pools that overlap or are too small, a folder that holds something else.
    """
    folder = Path(folder)
    names = tuple(kinds) if kinds is not None else TRAINED
    pool, demo_pool = _pools(split, words, demo_words)
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ConfigError(f"unknown kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    if per_kind < 1 or examples < 0:
        raise ConfigError("per_kind must be at least 1 and examples at least 0")
    arguments = {
        "format": FORMAT,
        "split": split,
        "kinds": list(names),
        "per_kind": per_kind,
        "seed": seed,
        "examples": examples,
        "base_image": base_image,
        "pools": hashlib.sha256(json.dumps([pool, demo_pool]).encode()).hexdigest(),
    }
    manifest = folder / MANIFEST
    if folder.exists():
        if manifest.is_file() and json.loads(manifest.read_text("utf-8")) == arguments:
            return folder
        if not manifest.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is not a bundled task set; name another folder")

    staging = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        for name in names:
            for number, (instance, shown) in enumerate(
                _instances(KINDS[name], split, per_kind, seed, pool, demo_pool, examples)
            ):
                _write_task(staging / f"{name}-{number:04d}", KINDS[name], split, instance, shown, base_image)
        (staging / MANIFEST).write_text(json.dumps(arguments, indent=1) + "\n", "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _pools(
    split: str, words: Sequence[str] | None, demo_words: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str]]:
    if words is None and (split not in POOLS or split == "demo"):
        splits = ", ".join(name for name in POOLS if name != "demo")
        raise ConfigError(f"unknown split {split!r}; there are: {splits} (or give a pool of words)")
    pool = list(words) if words is not None else list(POOLS[split])
    demo_pool = list(demo_words) if demo_words is not None else list(POOLS["demo"])
    for name, given in (("words", pool), ("demo words", demo_pool)):
        bad = [word for word in given if not (word.isascii() and word.islower() and word.isalpha())]
        if bad:
            raise ConfigError(f"{name}: {bad[0]!r} is not a word of lower-case letters a to z")
        if len(set(given)) < len(given) or len(given) < 12:
            raise ConfigError(f"{name}: at least 12 different words are needed, got {len(set(given))} in {len(given)}")
    both = sorted(set(pool) & set(demo_pool))
    if both:
        raise ConfigError(f"the pool of words and the pool of the examples share {', '.join(both[:5])}")
    return pool, demo_pool


def _instances(
    kind: Kind,
    split: str,
    count: int,
    seed: int,
    pool: Sequence[str],
    demo_pool: Sequence[str],
    examples: int,
) -> list[tuple[Instance, list[Instance]]]:
    """``count`` different instances with their examples. A prefix of a longer list: ``per_kind`` only adds."""
    rng = random.Random(f"{seed}/{split}/{kind.name}")
    seen: set[str] = set()
    made: list[tuple[Instance, list[Instance]]] = []
    misses = 0
    while len(made) < count:
        instance = kind.make(Words(rng, pool))
        key = repr((instance.instruction, sorted(instance.seeds.items())))
        if key in seen:
            misses += 1
            if misses > 100 * count:
                raise ConfigError(
                    f"kind {kind.name}: {len(pool)} words give no {count} different tasks; lower per_kind or add words"
                )
            continue
        seen.add(key)
        made.append((instance, [kind.make(Words(rng, demo_pool)) for _ in range(examples)]))
    return made


def _write_task(
    folder: Path, kind: Kind, split: str, instance: Instance, shown: Sequence[Instance], base_image: str
) -> None:
    files = {
        "task.toml": _task_toml(kind, split, instance, shown),
        "instruction.md": instance.instruction,
        "environment/Dockerfile": _dockerfile(instance, base_image),
        "solution/solve.sh": _script(command for command, _ in instance.steps),
        "solution/wrong.sh": _script([instance.wrong]),
        "tests/test.sh": _test(instance),
        **{f"environment/{path}": content for path, content in instance.seeds.items()},
    }
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, "utf-8")
        if path.endswith(".sh"):
            target.chmod(0o755)


def _script(commands: Iterable[str]) -> str:
    return "#!/bin/sh\nset -e\n" + "".join(f"{command}\n" for command in commands)


def _dockerfile(instance: Instance, base_image: str) -> str:
    roots = sorted({path.split("/")[0] for path in instance.seeds})
    copies = "".join(f"COPY {root} /workspace/{root}\n" for root in roots)
    return f"FROM {base_image}\nWORKDIR /workspace\n{copies}"


def _task_toml(kind: Kind, split: str, instance: Instance, shown: Sequence[Instance]) -> str:
    # a JSON string of ASCII text is a TOML basic string too
    lines = [
        'schema_version = "1.3"',
        "",
        "[metadata]",
        f'kind = "{kind.name}"',
        f'difficulty = "{kind.difficulty}"',
        'category = "shell"',
        f'split = "{split}"',
        "",
        "[metadata.rlcore]",
        "image_optional = true",
        "end_processes = true",
        f"max_commands = {len(instance.steps)}",
    ]
    for example in shown:
        for role, content in _messages(example):
            lines += ["", "[[metadata.rlcore.examples]]", f'role = "{role}"', f"content = {json.dumps(content)}"]
    lines += [
        "",
        "[agent]",
        "timeout_sec = 120",
        "",
        "[verifier]",
        "timeout_sec = 20",
        "",
        "[environment]",
        "cpus = 1",
        "memory_mb = 256",
        "storage_mb = 64",
        'workdir = "/workspace"',
        'network_mode = "no-network"',
    ]
    return "\n".join(lines) + "\n"


def _messages(example: Instance) -> list[tuple[str, str]]:
    """A solved example as chat messages; ends with the last command, whose output nobody needs."""
    messages = [("user", example.instruction)]
    for number, (command, output) in enumerate(example.steps):
        messages.append(("assistant", command))
        if number + 1 < len(example.steps):
            messages.append(("user", output))
    return messages


def _test(instance: Instance) -> str:
    """Passes when the folder holds exactly the result: nothing more, nothing less, no links in place of files."""
    listing = "\n".join(sorted(f"./{path}" for path in instance.result))
    checks = [f'[ "$(find . -mindepth 1 | LC_ALL=C sort)" = {shlex.quote(listing)} ]']
    for path, content in instance.result.items():
        if content is None:
            checks.append(f"is_folder {path}")
        elif not content:
            checks.append(f"is_empty_file {path}")
        else:
            checks.append(f"is_file {path} {shlex.quote(content.rstrip())}")
    condition = " &&\n   ".join(checks)
    return (
        "#!/bin/sh\n"
        'is_folder() { [ -d "$1" ] && [ ! -L "$1" ]; }\n'
        'is_file() { [ -f "$1" ] && [ ! -L "$1" ] && [ "$(cat "$1")" = "$2" ]; }\n'
        'is_empty_file() { [ -f "$1" ] && [ ! -L "$1" ] && [ ! -s "$1" ]; }\n'
        f"if {condition}\n"
        "then reward=1; else reward=0; fi\n"
        "echo $reward > /logs/verifier/reward.txt\n"
    )
