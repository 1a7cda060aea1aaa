"""Any causal model through transformers: its own forward and its own cache, one sequence at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlcore.errors import ConfigError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlcore_engine.models.base import Prefilled, check_weights, limit_context
from rlcore_engine.models.prefixes import PrefixStore

__all__ = ["TransformersSide"]


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    cache: Any


class TransformersSide:
    """See :class:`rlcore_engine.models.base.ModelSide`. Correct for every family rather than fast.

    Caches are the model's own and are never cut: a prompt reuses one that it continues as a whole.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        dtype: torch.dtype,
        *,
        context_length: int | None = None,
        prefix_tokens: int = 8192,
    ) -> None:
        """Load by ``from_pretrained``."""
        self.dtype = dtype
        self.context_length = limit_context(config, context_length)
        try:
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"model.path: transformers cannot load {folder}: {error}") from error
        self._adopt(model)
        self._stored = _stored_shapes(folder)
        # transformers may name weights otherwise than the checkpoint does, and join them (experts, say)
        self._converted = bool(self._stored.keys() - self._targets.keys() - self._tied.keys())
        self.vocab_size: int = self._model.config.vocab_size
        self._slots: list[_Slot] = []
        self._prefixes: PrefixStore[Any] = PrefixStore(prefix_tokens)

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def _adopt(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)
        accepted = inspect.signature(self._model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        # transformers 5.24 gave the argument a new name
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._targets: dict[str, Tensor] = {}
        self._tied: dict[str, str] = {}
        owner: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in self._model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            first = owner.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
            if first == name:
                self._targets[name] = tensor
            else:
                self._tied[name] = first

    # --- weights ------------------------------------------------------------------------------------------------------

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight by its name in the checkpoint."""
        return self._stored if self._converted else self._own_shapes()

    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._targets.items()}

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights as they serve, by their names in the module."""
        return self._targets

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, or raise before the first is touched. The names of the module serve as well."""
        given = list(weights)
        names = {name for name, _ in given}
        if not self._converted or names <= self._targets.keys() | self._tied.keys():
            found = check_weights(self._own_shapes(), self._tied, given)
            for name, target in self._targets.items():
                target.copy_(found[name])
            return
        found = check_weights(self._stored, {}, given)
        with torch.inference_mode(False):
            model, report = type(self._model).from_pretrained(
                None,
                config=self._model.config,
                state_dict={name: tensor.clone() for name, tensor in found.items()},
                dtype=self.dtype,
                output_loading_info=True,
            )
        problems = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
        if problems:
            raise ConfigError(f"these weights do not fit the model: {', '.join(map(str, problems[:5]))}")
        self._adopt(model)

    # --- the forward --------------------------------------------------------------------------------------------------

    def _step(self, token_ids: Sequence[int], cache: Any) -> tuple[Tensor, Any]:
        """Logits ``[V]`` float32 behind the tokens, and the cache that holds them."""
        out = self._model(torch.tensor([list(token_ids)]), **{self._cache_name: cache}, **self._options)
        return out.logits[0, -1].float(), out[self._cache_name]

    def decode(self, token_ids: Sequence[int]) -> Tensor:
        """One token for every active slot: ``[active, V]`` float32."""
        rows = []
        for slot, token in zip(self._slots, token_ids, strict=True):
            logits, slot.cache = self._step([token], slot.cache)
            slot.tokens.append(token)
            rows.append(logits)
        return torch.stack(rows)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Generator[None, None, Prefilled]:
        """Equal prompts are computed once."""
        done: dict[tuple[int, ...], tuple[Tensor, Any]] = {}
        slots, rows, cached = [], [], []
        for prompt in prompts:
            key = tuple(prompt)
            if key in done:
                cached.append(len(key))
            else:
                if done:
                    yield
                known, cache = self._known(key)
                done[key] = self._step(key[known:], cache)
                cached.append(known)
            logits, cache = done[key]
            slots.append(_Slot(list(key), copy.deepcopy(cache)))
            rows.append(logits)
        self._slots += slots
        return Prefilled(torch.stack(rows), tuple(cached))

    def _known(self, prompt: tuple[int, ...]) -> tuple[int, Any]:
        """The longest kept sequence that the prompt continues, and a copy of its cache."""
        fits = [
            (len(t), t, kept) for t, kept in self._prefixes.entries() if len(t) < len(prompt) and prompt[: len(t)] == t
        ]
        if not fits:
            return 0, None
        length, tokens, kept = max(fits, key=lambda entry: entry[0])
        self._prefixes.touch(tokens)
        return length, copy.deepcopy(kept)

    # --- slots --------------------------------------------------------------------------------------------------------

    def release(self, slot: int, *, keep: bool, poisoned: bool = False) -> None:
        """Free a slot; the last active one takes its place."""
        gone = self._slots[slot]
        if keep and self._prefixes.worth(gone.tokens):
            self._prefixes.put(gone.tokens, gone.cache)
        last = self._slots.pop()
        if slot < len(self._slots):
            self._slots[slot] = last

    def forget(self) -> None:
        """Forget every kept prefix."""
        self._prefixes.clear()


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a folder's float tensors by their names in its safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if "F" in part.get_dtype():
                    shapes[name] = tuple(part.get_shape())
    return shapes
