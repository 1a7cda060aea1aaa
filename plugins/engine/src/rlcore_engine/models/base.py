"""What both sides of the model seam are, and how weights are checked before any of them is touched."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["ModelSide", "Prefilled", "check_weights", "choose_dtype", "limit_context"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill computed.

    Attributes:
        logits: ``[N, V]`` float32 of the token after each prompt.
        cached: N prompt tokens that were not computed, because their keys and values were known.
    """

    logits: Tensor
    cached: tuple[int, ...]


class ModelSide(Protocol):
    """A model with its key-value slots. Used by one thread at a time.

    Active slots are numbered 0 to ``active - 1``: a prefill appends, and :meth:`release` moves the last slot into the gap.
    """

    vocab_size: int
    context_length: int
    dtype: torch.dtype
    active: int

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Generator[None, None, Prefilled]:
        """Compute prompts together and give each a slot, in order, when the generator returns.

        Each ``yield`` is a place where other work may be done (``decode`` and ``release`` too); closing it undoes all.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """Append one token to every active slot; ``[active, V]`` float32 logits of the next."""
        ...

    def release(self, slot: int, *, keep: bool, poisoned: bool = False) -> None:
        """Free a slot. ``keep`` its keys and values for later prompts; ``poisoned``: they may not be finite."""
        ...

    def forget(self) -> None:
        """Forget every kept prefix; active slots go on, and no later prompt shares what they hold now."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight by its checkpoint name, tied ones once."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, or raise ``ConfigError`` before the first is touched."""
        ...

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights as they serve, by checkpoint name, tied ones once; not to be written to."""
        ...


def choose_dtype(name: str, config: Any) -> torch.dtype:
    """The dtype of a configuration; ``auto``: float32 for float32 checkpoints, else bfloat16."""
    import torch

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name in names:
        return names[name]
    if name != "auto":
        raise ConfigError(f"model.dtype = {name!r}: auto, float32 or bfloat16")
    stored = getattr(config, "dtype", None) or torch.float32
    return torch.float32 if str(stored).removeprefix("torch.") == "float32" else torch.bfloat16


def limit_context(config: Any, wanted: int | None) -> int:
    """The model's own context, or less if so ``wanted``."""
    own = int(getattr(config, "max_position_embeddings", None) or wanted or 4096)
    return min(own, wanted or own)


def check_weights(
    shapes: Mapping[str, Sequence[int]], tied: Mapping[str, str], weights: Iterable[tuple[str, Any]]
) -> dict[str, Tensor]:
    """Everything that can be wrong with an update, found before anything is copied.

    Args:
        shapes: shape of every weight by its checkpoint name.
        tied: other names of some of them (``lm_head.weight`` of a model with tied embeddings).
        weights: names and tensors (numpy arrays too), in any order, of any float dtype and memory layout.

    Returns:
        A tensor for each name in ``shapes``.

    Raises:
        ConfigError: names every missing, unexpected and doubled name, wrong shape, and integer dtype.
    """
    import torch

    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, value in weights:
        tensor = torch.as_tensor(value).detach().cpu()
        key = tied.get(name, name)
        if key not in shapes:
            problems.append(f"unexpected {name}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}")
        elif tuple(tensor.shape) != tuple(shapes[key]):
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(shapes[key])}")
        elif key in found:
            if not (name in tied or key in tied.values()) or not torch.equal(found[key], tensor):
                problems.append(
                    f"{name} came twice" if key == name else f"{name} differs from {key}, to which it is tied"
                )
        else:
            found[key] = tensor
    problems += [f"missing {name}" for name in shapes if name not in found]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(f"these weights do not fit the model: {'; '.join(problems[:5])}{more}")
    return found
