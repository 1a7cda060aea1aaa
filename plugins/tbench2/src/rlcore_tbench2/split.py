"""Two disjoint parts of a set of tasks, with the same shares of every kind, as files with content hashes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rlcore.errors import ConfigError

from rlcore_tbench2.folder import TaskFolder, content_hash
from rlcore_tbench2.taskset import Report

__all__ = ["write_split"]


def write_split(report: Report, out: Path, *, held_out: int, seed: int, by: Sequence[str]) -> dict[str, int]:
    """Write ``out/train.json`` and ``out/eval.json`` and return their sizes.

    Depends on the tasks' ids, their metadata and ``seed`` alone. Each file holds the tasks' ids with their content
    hashes, and one hash over them, so two runs can tell whether they used the same tasks.

    Raises:
        ConfigError: more tasks held out than there are, or none left on a side.
    """
    folders = sorted(report.folders, key=lambda folder: folder.id)
    if not 0 < held_out < len(folders):
        raise ConfigError(f"--eval {held_out}: must be between 1 and {len(folders) - 1} ({len(folders)} tasks can run)")
    chosen = _choose(folders, held_out, seed, by)
    out.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name, part in (
        ("train", [folder for folder in folders if folder.id not in chosen]),
        ("eval", [folder for folder in folders if folder.id in chosen]),
    ):
        tasks = {folder.id: content_hash(folder.path) for folder in part}
        digest = hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest()
        content = {"part": name, "seed": seed, "by": list(by), "sha256": digest, "tasks": tasks}
        staging = out / f".{name}.json.{os.getpid()}"
        staging.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        os.replace(staging, out / f"{name}.json")
        sizes[name] = len(part)
    return sizes


def _choose(folders: Sequence[TaskFolder], held_out: int, seed: int, by: Sequence[str]) -> set[str]:
    """Ids to hold out: of each stratum its share, by largest remainders; ties and members by the seed."""
    strata: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for folder in folders:
        strata[tuple(str(folder.file.metadata.get(key, "")) for key in by)].append(folder.id)
    rng = random.Random(f"split/{seed}")
    shares = {key: held_out * len(members) / len(folders) for key, members in strata.items()}
    quota = {key: int(share) for key, share in shares.items()}
    order = sorted(shares, key=lambda key: (shares[key] - quota[key], rng.random()), reverse=True)
    for key in order[: held_out - sum(quota.values())]:
        quota[key] += 1
    return {name for key in sorted(strata) for name in rng.sample(strata[key], quota[key])}
