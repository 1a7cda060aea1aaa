"""Makes the tiny model that ships with this package: ``python -m rlcore_quickstart.make_tiny DIR``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["CONFIG", "random_weights", "tokenizer_json"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 256
"""A byte is its own token id; the special tokens follow."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 256,
    "dtype": "float32",
    "eos_token_id": 258,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 352,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 259,
}


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(256 + index) for index, byte in enumerate(shifted)}
    return [characters.get(byte, chr(byte)) for byte in range(256)]


def tokenizer_json() -> str:
    """A ``tokenizer.json`` without merges: one token per byte, and ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return str(tokenizer.to_str(pretty=False))


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Freshly initialised float32 tensors under their Hugging Face names."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    state = LlamaForCausalLM(LlamaConfig(**CONFIG)).state_dict()
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def write_model(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the checkpoint; weights are stored as bfloat16, half the size, and computed with in float32."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(tokenizer_json())
    tokenizer_config = {
        "bos_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
