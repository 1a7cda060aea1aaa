"""Named tensors out of a pickle that may be hostile: it can rebuild tensors and nothing else."""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from typing import Any

import torch
from torch import Tensor

__all__ = ["named_tensors"]


def _load_storage(data: bytes) -> Any:
    """A storage as ``pickle`` writes it; torch's own function of this place would run a second, unrestricted pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _rebuild_parameter(data: Tensor, _requires_grad: bool, _hooks: Any) -> Tensor:
    return data


_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): dict,  # the hooks of a tensor, always empty
}


class _TensorsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        hint = "; send tensors by value, not as shared memory" if "multiprocessing" in module else ""
        raise pickle.UnpicklingError(f"{module}.{name} is not admitted{hint}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids are not admitted")


def named_tensors(text: str) -> list[tuple[str, Tensor]]:
    """The ``[(name, tensor), …]`` of a base64 text.

    Raises:
        ValueError: it is something else, or names anything but what rebuilds a tensor.
    """
    try:
        found = _TensorsOnly(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except (
        binascii.Error, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError,
        RuntimeError,
    ) as error:  # fmt: skip
        raise ValueError(f"not a pickle of named tensors: {error}") from error
    pairs = list(found.items()) if isinstance(found, dict) else found
    if not isinstance(pairs, list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        for pair in pairs
    ):
        raise ValueError("not a list of (name, tensor)")
    return [(name, tensor) for name, tensor in pairs]
