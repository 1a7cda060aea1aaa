"""What a set of tasks asks for, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlcore_tbench2.taskset import Report

__all__ = ["statistics_of"]


def statistics_of(report: Report) -> dict[str, Any]:
    """Counts and quartiles over the tasks that can run, and how many folders of each sort there are."""
    folders = report.folders
    files = [folder.file for folder in folders]
    numbers: dict[str, list[float | None]] = {
        "agent seconds": [file.agent.timeout_sec for file in files],
        "verifier seconds": [file.verifier.timeout_sec for file in files],
        "build seconds": [file.build_timeout_sec for file in files],
        "cpus": [file.cpus for file in files],
        "memory MiB": [file.memory_mb for file in files],
        "disk MiB": [file.storage_mb for file in files],
        "instruction characters": [len(folder.instruction) for folder in folders],
    }
    counts = {
        key: Counter(str(file.metadata[key]) for file in files if file.metadata.get(key) not in (None, ""))
        for key in ("kind", "difficulty", "category")
    }
    counts["schema"] = Counter(file.schema or "none" for file in files)
    counts["network"] = Counter(file.agent.network_mode or file.network_mode for file in files)
    counts["image"] = Counter(
        "docker_image" if f.file.docker_image else "Dockerfile" if f.dockerfile else "none" for f in folders
    )
    return {
        "folders": {
            "tasks": len(folders),
            "unsupported": len(report.skipped),
            "broken": len(report.problems),
            "parked": len(report.found.parked),
            "templates": len(report.found.templates),
        },
        "counts": {key: dict(counter.most_common()) for key, counter in counts.items() if counter},
        "numbers": {
            name: _quartiles([value for value in values if value is not None]) for name, values in numbers.items()
        },
    }


def _quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Minimum, quartiles (linear between neighbours) and maximum of what is stated."""
    ordered = sorted(values)
    if not ordered:
        return {"stated": 0}

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    names = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 1.0}
    return {"stated": len(ordered), **{name: float(at(share)) for name, share in names.items()}}
