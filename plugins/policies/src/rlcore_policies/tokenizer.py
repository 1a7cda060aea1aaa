"""A tokenizer of the Hugging Face format, for the core's renderer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import ConfigError
from rlcore.rollout.render import ChatRenderer, Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["HfTokenizer", "load_renderer"]


def load_renderer(path: str | Path, **template_options: Any) -> ChatRenderer:
    """The renderer for the model in a folder.

    Args:
        path: folder with ``tokenizer.json`` and a chat template; nothing is downloaded.
        template_options: variables for the chat template (``enable_thinking``, ``tools``).

    Raises:
        ConfigError: the folder holds no usable tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; it must hold a model's tokenizer in Hugging Face format")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    return ChatRenderer(HfTokenizer(tokenizer, name=str(folder), stops=_stops(folder), **template_options))


class HfTokenizer:
    """Implements :class:`rlcore.rollout.render.Tokenizer` over a fast tokenizer of transformers.

    Text is encoded by a copy of the tokenizer in which every control token is known by a random name alone, so no text
    that somebody else wrote can spell one, and whatever the tokenizer does around a control token it still does.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        stops: frozenset[int] = frozenset(),
        **template_options: Any,
    ) -> None:
        self.name = name or str(tokenizer.name_or_path)
        if not tokenizer.chat_template:
            raise ConfigError(f"{self.name}: the tokenizer has no chat template (chat_template.jinja)")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{self.name}: the tokenizer is not a fast one (there is no tokenizer.json)")
        self._hf = tokenizer
        self._template_options = template_options
        spec = json.loads(backend.to_str())
        unknown = _unknown_token(spec["model"])
        self.controls: Mapping[str, int] = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            # runs of white space are text that happens to be in the list of added tokens; an unknown word is one too
            if token.content.strip() and token.content != unknown
        }
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stops = stops | frozenset(eos)
        self._names, self._encoder = _rename_controls(spec, self.controls, self.name)

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of text and control tokens in order."""
        text = "".join(self._names[piece] if isinstance(piece, int) else piece for piece in pieces)
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with its markers; undecodable bytes become U+FFFD."""
        text = self._hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def apply_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The chat template's text."""
        from jinja2 import TemplateError

        try:
            text = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self._template_options
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages[-4:])
            raise ConfigError(f"chat template of {self.name} refuses a conversation (…, {roles}): {error}") from error
        return str(text)


def _rename_controls(spec: dict[str, Any], controls: Mapping[str, int], name: str) -> tuple[dict[int, str], Tokenizer]:
    """A tokenizer that knows each control token by a random name, and these names by id."""
    from tokenizers import Tokenizer

    nonce = secrets.token_hex(8)
    renamed = {marker: f"\ue000{nonce}{number:08d}\ue001" for marker, number in controls.items()}
    for token in spec["added_tokens"]:
        if token["content"] in renamed:
            token["content"] = renamed[token["content"]]
            token["normalized"] = False
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(token, token): number for token, number in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & renamed.keys()]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    spec.update(post_processor=None, truncation=None, padding=None)
    encoder = Tokenizer.from_str(json.dumps(spec))
    names = {number: renamed[marker] for marker, number in controls.items()}
    if any(encoder.token_to_id(alias) != number for number, alias in names.items()):
        raise ConfigError(f"{name}: the tokenizer's control tokens cannot be told apart from text")
    return names, encoder


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    """What the model puts for a word that it does not know; ``None`` if it can spell everything in bytes."""
    if model.get("byte_fallback") or (model["type"] == "BPE" and model.get("unk_token") is None):
        return None
    if model["type"] == "Unigram":
        return None if model.get("unk_id") is None else str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _stops(folder: Path) -> frozenset[int]:
    """Ids that end a generation by ``generation_config.json`` or ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        if (file := folder / name).is_file():
            eos = json.loads(file.read_text("utf-8")).get("eos_token_id")
            if eos is not None:
                return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()
