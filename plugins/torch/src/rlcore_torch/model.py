"""A causal Hugging Face model as the trainer uses it: hidden states and log-probs of a layout."""

from __future__ import annotations

import fnmatch
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rlcore.errors import ConfigError
from rlcore_losses.logprob_head import selective_logprobs
from safetensors import SafetensorError

from rlcore_torch import llama
from rlcore_torch.head import target_logprobs
from rlcore_torch.layout import Layout, padded, shared

__all__ = ["CausalModel", "compute_dtype"]

Tensor = torch.Tensor

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*",
                    "merges.txt", "*.model", "*.tiktoken")  # fmt: skip

_ATTENTION_SLOWNESS = 4.0
"""How much longer an operation takes in attention with a mask than in a matrix product (measured, forward + backward)."""

_BLOCK = 128
"""Queries of one block of attention in the fast forward."""

_SMALL = 256
"""Hidden sizes below this compute in float32 by default: their matrices are too small for bfloat16 to pay."""


def compute_dtype(wanted: str, hidden_size: int, device: torch.device) -> torch.dtype:
    """``wanted``, or for ``auto`` bfloat16 where the hardware multiplies it faster than float32."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        fast = any(getattr(torch.cpu, test, bool)() for test in tests)
    return torch.bfloat16 if fast and hidden_size >= _SMALL else torch.float32


class CausalModel:
    """Loads a model and computes log-probs of layouts.

    What the model can do is found out by trying: on two short rows with a common prefix, hidden states of the merged
    layout, and log-probs from hidden states and output embedding, are compared with the model's plain forward. What
    differs is not used (sliding windows, recurrent layers, scaled or capped logits), and a line in the log says so.

    Attributes:
        fast: whether merged layouts run in the forward of :mod:`rlcore_torch.llama`.
        can_share: whether the model may see :func:`~rlcore_torch.layout.shared` layouts.
        reach: longest row for which that is true, or ``None``: any.
        pair_cost: see :func:`~rlcore_torch.plan.plan`.
        hidden_size: width of the hidden states.
        heed: called before every layer; what it raises ends the forward or backward.
    """

    def __init__(self, path: str | Path | None, device: torch.device, gradient_checkpointing: bool) -> None:
        if path is None:
            raise ConfigError("model.path: no model is given; name a folder in Hugging Face format")
        self.path = Path(path)
        self.device = device
        self.heed: Callable[[], None] = _nothing
        self.module = _load(self.path).to(device)
        _switch_off_dropout(self.module)
        if gradient_checkpointing:
            # transformers 5.24 gave the method a new name
            enable = getattr(self.module, "activation_checkpointing_enable", None)
            (enable or self.module.gradient_checkpointing_enable)()
            self.module.train()
        self._body = self.module.get_decoder() if hasattr(self.module, "get_decoder") else self.module.base_model
        for layer in getattr(self._body, "layers", ()):
            layer.register_forward_pre_hook(lambda *_: self.heed())
        head = self.module.get_output_embeddings()
        self._head = head if isinstance(head, torch.nn.Linear) and head.bias is None else None
        text = self.module.config.get_text_config()
        self.hidden_size = int(text.hidden_size)
        self.reach = _attention_window(text)
        self.pair_cost = _pair_cost(self._body, self.hidden_size)
        self._recompute = gradient_checkpointing
        self.can_share = True
        self.fast = llama.fits(self.module) and self._head is not None
        self._probe()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by name; tied ones once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def dtypes(self, wanted: torch.dtype) -> dict[str, torch.dtype]:
        """What each parameter computes in: ``wanted``, but float32 where the model insists on it."""
        keep = [str(part) for part in self.module._keep_in_fp32_modules_strict or ()]
        return {name: torch.float32 if any(part in name for part in keep) else wanted for name in self.parameters()}

    def logprobs(self, layout: Layout, temperature: float, chunk: int | None = None) -> Tensor:
        """``[S]`` float32 log-probs of the layout's targets, with gradient where it is enabled."""
        return target_logprobs(*self._inputs(layout), temperature, chunk)

    def logprobs_and_entropies(self, layout: Layout, temperature: float, chunk: int | None) -> tuple[Tensor, Tensor]:
        """``[S]`` log-probs, and the entropies in nats of the distributions that they are of, with gradient."""
        states, weight, sources, targets = self._inputs(layout)
        logprobs, entropies = selective_logprobs(states[sources], weight, targets, temperature, chunk, entropy=True)
        return logprobs, entropies

    def _inputs(self, layout: Layout) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Hidden states, output embedding, sources and targets."""
        weight = None if self._head is None else self._head.weight
        sources, targets = (torch.from_numpy(array).to(self.device) for array in (layout.sources, layout.targets))
        return self._states(layout), weight, sources, targets

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors named as in the Hugging Face checkpoint, tied ones once."""
        from transformers.core_model_loading import revert_weight_conversion

        tied = set(getattr(self.module, "all_tied_weights_keys", None) or ())
        state = {name: tensor for name, tensor in self.module.state_dict().items() if name not in tied}
        yield from revert_weight_conversion(self.module, state).items()

    def export(self, directory: Path) -> None:
        """Config, weights in the forward's dtype, and the tokenizer's files."""
        directory.mkdir(parents=True, exist_ok=True)
        self.module.config.dtype = self.module.dtype
        with _no_progress_bar():
            self.module.save_pretrained(directory)
        for file in sorted(self.path.iterdir()):
            if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES):
                shutil.copyfile(file, directory / file.name)

    def _states(self, layout: Layout) -> Tensor:
        """``[B * L, D]`` hidden states, or logits if the output embedding cannot be applied from outside."""
        token_ids = torch.from_numpy(layout.token_ids).to(self.device)
        positions = torch.from_numpy(layout.positions).to(self.device)
        if self.fast and layout.trie is not None:
            blocks = list(layout.blocks(_BLOCK))
            return llama.hidden_states(self.module, token_ids[0], positions[0], blocks, self._recompute, self.heed)
        mask = None
        if layout.trie is not None:
            visible = torch.from_numpy(layout.trie.mask()).to(self.device)
            mask = torch.zeros(visible.shape, dtype=self.module.dtype, device=self.device)
            mask = mask.masked_fill_(~visible, float("-inf"))[None, None]
        model = self.module if self._head is None else self._body
        output = model(input_ids=token_ids, attention_mask=mask, position_ids=positions, use_cache=False)
        states: Tensor = output.logits if self._head is None else output.last_hidden_state
        return states.flatten(0, 1)

    @torch.no_grad()
    def _probe(self) -> None:
        rows, masks = _probe_rows(self.module.config)
        reference = torch.cat([self._plain(row)[mask] for row, mask in zip(rows, masks, strict=True)])
        if self._head is not None and not _close(self._gathered(padded(rows, masks)), reference):
            _log.info("%s: log-probs need the model's own logits (%s)", self.path, type(self.module).__name__)
            self._head = None
        if self.fast and not _close(self._gathered(shared(rows, masks)), reference):
            _log.warning("%s: the fast forward differs from transformers'; it is not used", self.path)
            self.fast = False
        if not self.fast:
            self.can_share = self._takes_masks(rows, masks, reference)

    def _takes_masks(self, rows: list[list[int]], masks: list[list[bool]], reference: Tensor) -> bool:
        name = type(self.module).__name__
        try:
            same = _close(self._gathered(shared(rows, masks)), reference)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            _log.info("%s: %s does not take an attention mask: %s", self.path, name, error)
            same = False
        if not same:
            _log.warning("%s: %s cannot share prefixes; rows are computed side by side", self.path, name)
        return same

    def _plain(self, row: list[int]) -> Tensor:
        """``[T]`` log-prob of each token of one row by the model's ordinary forward; 0 for the first."""
        token_ids = torch.tensor([row], device=self.device)
        logits = self.module(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        return torch.cat([logits.new_zeros(1), logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0]])

    def _gathered(self, layout: Layout) -> Tensor:
        return self.logprobs(layout, 1.0)[torch.from_numpy(layout.scores).to(self.device)]


def _nothing() -> None:
    pass


def _load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a model in Hugging Face format (it has no config.json)")
    try:
        with _no_progress_bar():
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.path: {path} cannot be loaded: {error}") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _switch_off_dropout(module: Any) -> None:
    """Gradient checkpointing needs the training mode, and log-probs must be those of the engine."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_p"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def _attention_window(config: Any) -> int | None:
    """The shortest distance at which a layer stops to see the past; ``None``: none does."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    found = [w for w in windows if isinstance(w, int) and w > 0]
    return min(found, default=None)


def _pair_cost(body: Any, hidden_size: int) -> float:
    """Cost of a query-key pair over the cost of a position: floating-point operations, and how well they run.

    A pair is ``4 * hidden_size`` operations in a layer, a position two for each weight of it.
    """
    layers = max(1, int(body.config.get_text_config().num_hidden_layers))
    weights = sum(p.numel() for name, p in body.named_parameters() if p.ndim > 1 and "embed" not in name)
    return _ATTENTION_SLOWNESS * 4 * hidden_size * layers / max(1, 2 * weights)


def _probe_rows(config: Any) -> tuple[list[list[int]], list[list[bool]]]:
    """Three short rows, two with a common prefix of six tokens."""
    size = config.get_text_config().vocab_size
    draw = torch.randint(0, size, (26,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [draw[:6] + draw[6:12], draw[:6] + draw[12:16], draw[16:26]]
    return rows, [[t > 0 for t in range(len(row))] for row in rows]


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-3 * max(1.0, float(expected.abs().max())))
