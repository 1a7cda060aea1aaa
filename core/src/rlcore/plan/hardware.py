"""GPUs that the planner knows. Figures are the vendors' dense peaks; memory is what a process can use."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.errors import ConfigError
from rlcore.plugins import nearest

__all__ = ["GPUS", "Gpu", "gpu_named"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: usable memory in GiB (2^30 bytes).
        bf16_tflops: dense bf16 peak in 1e12 operations per second.
        memory_gb_s: memory bandwidth in GB (1e9 bytes) per second.
        link_gb_s: bandwidth between GPUs of a node in GB per second and direction.
        fabric_gb_s: bandwidth between nodes per GPU in GB per second and direction.
        per_node: GPUs of a usual node.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    memory_gb_s: float
    link_gb_s: float
    fabric_gb_s: float
    per_node: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("gb300", 274.5, 2500.0, 8000.0, 900.0, 100.0, 4),
        Gpu("b200", 178.0, 2250.0, 8000.0, 900.0, 50.0, 8),
        Gpu("h200", 139.8, 989.0, 4800.0, 450.0, 50.0, 8),
        Gpu("h100", 79.1, 989.0, 3350.0, 450.0, 50.0, 8),
    )
}
"""By name."""


def gpu_named(name: str) -> Gpu:
    """Raises ``ConfigError`` with the nearest name."""
    if name.lower() not in GPUS:
        raise ConfigError(f"gpu {name!r} is unknown{nearest(name, GPUS)}")
    return GPUS[name.lower()]
