"""The bundled task set: small shell tasks that a 135M model can start to solve, written as real task folders."""

from rlcore_tbench2.bundled.kinds import KINDS, NEVER_TRAINED, TRAINED
from rlcore_tbench2.bundled.words import POOLS
from rlcore_tbench2.bundled.write import write_tasks

__all__ = ["KINDS", "NEVER_TRAINED", "POOLS", "TRAINED", "write_tasks"]
