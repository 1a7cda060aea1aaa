"""A trainer's checkpoint: float32 masters, AdamW's moments, the number of updates and the RNG states."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rlcore.errors import ConfigError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlcore_torch.adamw import MasterAdamW

__all__ = ["load", "save", "writing"]

MASTERS = "masters.safetensors"
MOMENTS = "moments.safetensors"
STATE = "trainer.pt"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name ``path`` in the ``OSError`` of a full or refusing disk, for which safetensors has a class of its own."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and not re.search("i/?o ?error", str(error), re.IGNORECASE):
            raise
        raise OSError(f"{path}: {error}") from error


def save(directory: Path, optimizer: MasterAdamW) -> None:
    """Write the three files; the caller makes the directory atomic. Raises ``OSError`` if the disk is full or refuses."""
    directory.mkdir(parents=True, exist_ok=True)
    with writing(directory / MASTERS):
        save_file({name: tensor.contiguous() for name, tensor in optimizer.masters.items()}, directory / MASTERS)
    with writing(directory / MOMENTS):
        save_file(optimizer.state_dict(), directory / MOMENTS)
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "updates": optimizer.updates,
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy_rng": (kind, keys.tolist(), position, has_gauss, cached),
        "python_rng": random.getstate(),
    }
    packed = io.BytesIO()  # torch's own writer of files hides the disk's reason
    torch.save(state, packed)
    with writing(directory / STATE):
        (directory / STATE).write_bytes(packed.getbuffer())


def load(directory: Path, optimizer: MasterAdamW) -> None:
    """Read them back into the optimizer and the generators.

    Raises:
        ConfigError: a file is missing or unreadable, or the tensors are not those of this model.
    """
    device = str(next(iter(optimizer.masters.values())).device)
    try:
        masters = load_file(directory / MASTERS, device=device)
        moments = load_file(directory / MOMENTS, device=device)
        state = torch.load(directory / STATE, weights_only=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{directory}: not a readable checkpoint of the torch trainer: {error}") from error
    wrong = set(masters.keys() ^ optimizer.masters.keys()) | {
        name
        for name in masters.keys() & optimizer.masters.keys()
        if masters[name].shape != optimizer.masters[name].shape
    }
    if wrong:
        raise ConfigError(
            f"{directory}: a checkpoint of another model than model.path: {len(wrong)} tensors differ "
            f"({', '.join(sorted(wrong)[:3])}, …)"
        )
    optimizer.load(masters, moments, state["updates"])
    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    kind, keys, position, has_gauss, cached = state["numpy_rng"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python_rng"]
    random.setstate((version, tuple(internal), gauss))
