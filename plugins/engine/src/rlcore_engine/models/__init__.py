"""The model seam: a fast forward for the Llama family and a generic one through transformers."""

from __future__ import annotations

from pathlib import Path

from rlcore.errors import ConfigError

from rlcore_engine.models.base import ModelSide

__all__ = ["ModelSide", "load_model"]


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    side: str = "auto",
    context_length: int | None = None,
    prefix_tokens: int = 8192,
    chunk_tokens: int = 512,
) -> ModelSide:
    """Load the model of a Hugging Face folder.

    Args:
        path: the folder.
        dtype: ``float32``, ``bfloat16``, or ``auto``: that of the checkpoint, where float16 becomes bfloat16.
        side: ``llama`` (fast), ``transformers`` (any causal model), or ``auto``: fast where it can be.
        context_length: largest number of tokens in a sequence; ``None``: the model's own.
        prefix_tokens: tokens of finished requests whose keys and values are kept.
        chunk_tokens: tokens of one prefill forward.

    Raises:
        ConfigError: names the folder and what it lacks.
    """
    from transformers import AutoConfig

    from rlcore_engine.models.base import choose_dtype
    from rlcore_engine.models.generic import TransformersSide
    from rlcore_engine.models.llama import LlamaSide, unsupported

    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: no model in {folder} (config.json is missing)")
    try:
        config = AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: cannot read {folder / 'config.json'}: {error}") from error
    chosen = choose_dtype(dtype, config)
    reason = unsupported(config, folder)
    if side == "llama" and reason:
        raise ConfigError(f"engine.side = llama cannot serve {folder}: {reason}")
    if side == "transformers" or reason:
        return TransformersSide(folder, config, chosen, context_length=context_length, prefix_tokens=prefix_tokens)
    return LlamaSide(
        folder,
        config,
        chosen,
        context_length=context_length,
        prefix_tokens=prefix_tokens,
        chunk_tokens=chunk_tokens,
    )
