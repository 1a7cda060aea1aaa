"""From messages to token ids, so that no content can ever become a control token.

A chat template is rendered with a sentinel in the place of every content. Only what stands between the sentinels, the
template's own glue, is searched for control tokens; the contents are encoded as plain text. Neighbouring plain pieces are
joined before they are encoded, so for harmless content the ids equal the tokenizer's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rlcore.errors import ConfigError
from rlcore.types import Completion, Message

__all__ = ["REASONING", "ChatRenderer", "Piece", "Tokenizer", "scrub", "visible"]

REASONING = ("<think>", "</think>")
"""The markers around a policy's thinking."""

Piece: TypeAlias = str | int
"""Plain text, or the id of a control token."""


class Tokenizer(Protocol):
    """What a renderer needs of a tokenizer."""

    name: str
    """For error messages."""

    controls: Mapping[str, int]
    """Text and id of everything that is not ordinary text: special tokens and every other added marker."""

    stops: frozenset[int]
    """Ids that end a generation, as the tokenizer and the model's generation configuration say; may be empty."""

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of the pieces in order; text, whatever it holds, gives no id of ``controls``."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, markers included; undecodable bytes become U+FFFD."""
        ...

    def apply_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The chat template's text for OpenAI-style messages. Raises ``ConfigError`` if the template refuses them."""
        ...


@dataclass(frozen=True, slots=True)
class _Content:
    """A sentinel that stood in the template's output, and the text that it stands for."""

    key: str
    text: str


_Part: TypeAlias = str | int | _Content


@dataclass(slots=True)
class ChatRenderer:
    """Implements :class:`rlcore.protocols.Renderer` over a tokenizer with a chat template.

    The whitespace around a content and the reasoning markers of an assistant's message do reach the template, so that it
    can trim or cut as it was written to; everything else of a content does not. Templates must put each content out
    unchanged and exactly once (an assistant's thinking may be left out): anything else is a ``ConfigError``. Keys other
    than ``content`` pass through the template, with every character that could begin or end a marker shielded.

    Attributes:
        tokenizer: the tokenizer.
        reasoning: the markers around thinking that templates cut out of earlier turns.
    """

    tokenizer: Tokenizer
    reasoning: tuple[str, str] = REASONING
    end_ids: frozenset[int] = field(init=False)
    """Ids that end a turn; an engine stops at them and :meth:`decode` leaves them out."""
    _nonce: str = field(init=False)
    _sentinel: re.Pattern[str] = field(init=False)
    _control: re.Pattern[str] = field(init=False)
    _edges: re.Pattern[str] = field(init=False)
    _control_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        markers = sorted((m for m in self.tokenizer.controls if m), key=len, reverse=True)
        self._nonce = "rlcore" + secrets.token_hex(8)
        self._sentinel = re.compile(self._nonce + r"([cs]\d+p?\d*)z")
        self._control = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        edges = {edge for marker in markers for edge in (marker[0], marker[-1])}
        self._edges = re.compile("[" + "".join(map(re.escape, sorted(edges))) + "]" if edges else r"(?!)")
        self._control_ids = frozenset(self.tokenizer.controls.values())
        self.end_ids = self.tokenizer.stops | self._end_of_turn()

    def render(self, messages: Sequence[Message]) -> list[int]:
        """``[P]`` ids of the whole conversation up to where the assistant begins to speak."""
        return self._encode(self._parts(messages))

    def extend(self, history: Sequence[Message], completion: Completion, new: Sequence[Message]) -> list[int] | None:
        """Ids to append behind ``completion.token_ids``; ``None`` if the template would rewrite the past.

        The past is rewritten if the template's text up to the end of the completion is not, white space aside, the text
        that the completion was sampled after, followed by the completion.
        """
        said = completion.message or Message("assistant", completion.text or self.decode(completion.token_ids))
        at = len(history)
        past = [*self._parts(history), *self._inside(said, at)]
        now = self._parts([*history, said, *new], unpadded=at)
        cut = _end_of_prefix(past, now)
        if cut is None:
            return None
        return self._tail(completion.token_ids, now, cut)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids without the end-of-turn marker; undecodable bytes become U+FFFD."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self.end_ids:
            end -= 1
        return self.tokenizer.decode(token_ids[:end])

    # --- the template's output as parts: glue text, control ids, contents -------------------------------------------

    def _parts(
        self, messages: Sequence[Message], *, unpadded: int | None = None, add_generation_prompt: bool = True
    ) -> list[_Part]:
        contents: dict[str, str] = {}
        optional: set[str] = set()
        raw = [self._shield(m, i, i == unpadded, contents, optional) for i, m in enumerate(messages)]
        text = self.tokenizer.apply_template(raw, add_generation_prompt=add_generation_prompt)
        parts: list[_Part] = []
        seen: dict[str, int] = {}
        for glue, key in _split(self._sentinel, text):
            parts.extend(self._glue(glue))
            if key is None:
                continue
            seen[key] = seen.get(key, 0) + 1
            parts.append(chr(int(key[1:])) if key[0] == "s" else _Content(key, contents[key]))
        for key in contents:
            if seen.get(key, 0) > 1 or (key not in seen and key not in optional):
                number = int(key[1:].split("p")[0])
                raise ConfigError(
                    f"chat template of {self.tokenizer.name}: the content of message {number} "
                    f"({messages[number].role}) comes out {seen.get(key, 0)} times unchanged instead of once; "
                    "the template drops, repeats or transforms it, so it cannot be encoded safely"
                )
        return parts

    def _shield(
        self, message: Message, index: int, unpadded: bool, contents: dict[str, str], optional: set[str]
    ) -> dict[str, Any]:
        shielded = {key: self._shield_value(value) for key, value in message.extra.items()}
        text = ""
        pieces = self._structure(message)
        for number, (piece, is_marker) in enumerate(pieces):
            core = piece.strip()
            if is_marker or not core:
                text += piece
                continue
            key = f"c{index}p{number}"
            contents[key] = core
            if number < len(pieces) - 1:
                optional.add(key)
            start = piece.index(core)
            text += piece[:start] + f"{self._nonce}{key}z" + piece[start + len(core) :]
        return {"role": message.role, "content": text.strip() if unpadded else text, **shielded}

    def _structure(self, message: Message) -> list[tuple[str, bool]]:
        """The content, cut at the reasoning markers (flagged) where the policy itself speaks."""
        content = scrub(message.content)
        if message.role != "assistant" or self.reasoning[1] not in content:
            return [(content, False)]
        pieces = re.split(f"({'|'.join(map(re.escape, self.reasoning))})", content)
        return [(piece, number % 2 == 1) for number, piece in enumerate(pieces) if piece]

    def _shield_value(self, value: Any) -> Any:
        if isinstance(value, str):
            if value.isidentifier() and not self._control.search(value):
                return value  # templates compare such values: type == "function"
            return self._edges.sub(lambda match: f"{self._nonce}s{ord(match[0])}z", scrub(value))
        if isinstance(value, Mapping):
            return {self._shield_value(key): self._shield_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield_value(item) for item in value]
        return value

    def _inside(self, message: Message, index: int) -> Iterator[_Part]:
        """The parts of an assistant's content as they stand behind the prompt that it was sampled after."""
        for number, (piece, is_marker) in enumerate(self._structure(message)):
            if core := piece.strip():
                yield from self._glue(core) if is_marker else [_Content(f"c{index}p{number}", core)]

    def _glue(self, text: str) -> Iterator[_Part]:
        for plain, marker in _split(self._control, text, group=0):
            if plain:
                yield plain
            if marker is not None:
                yield self.tokenizer.controls[marker]

    # --- parts as ids -----------------------------------------------------------------------------------------------

    def _encode(self, parts: Sequence[_Part]) -> list[int]:
        pieces: list[Piece] = []
        for part in parts:
            text = part.text if isinstance(part, _Content) else part
            if isinstance(text, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += text
            else:
                pieces.append(text)
        ids = self.tokenizer.encode(pieces)
        wanted = [piece for piece in pieces if isinstance(piece, int)]
        if [i for i in ids if i in self._control_ids] != wanted:
            raise ConfigError(f"tokenizer of {self.tokenizer.name}: plain text was encoded as control tokens")
        return ids

    def _tail(self, sampled: Sequence[int], now: Sequence[_Part], cut: tuple[int, int]) -> list[int]:
        index, offset = cut
        parts = list(now[index:])
        if parts and offset and isinstance(parts[0], str):
            parts[0] = parts[0][offset:]
        parts = [part for part in parts if part != ""]
        last = sampled[-1] if sampled else None
        lead = next((n for n, part in enumerate(parts) if not (isinstance(part, str) and not part.strip())), None)
        if last in self._control_ids and lead is not None and parts[lead] == last:
            return self._encode(parts[lead:])[1:]  # the marker was sampled: encode behind it, then leave it out
        return self._encode(parts)

    def _end_of_turn(self) -> frozenset[int]:
        """The control token that the template puts behind an assistant's content, if it puts one."""
        talk = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
        try:
            parts = self._parts(talk)
        except ConfigError:
            return frozenset()  # said when something is rendered, with the real messages
        behind = parts[next(n for n, p in enumerate(parts) if isinstance(p, _Content) and p.key == "c1p0") + 1 :]
        first = next((part for part in behind if not isinstance(part, str) or part.strip()), None)
        return frozenset([first]) if isinstance(first, int) else frozenset()


def visible(text: str) -> str:
    """What the policy said, without its thinking: a command that it only considers is not to be executed."""
    _, closed, said = text.rpartition(REASONING[1])
    return said.lstrip("\n") if closed else text


def scrub(text: str) -> str:
    """``text`` with lone surrogates replaced by U+FFFD: no tokenizer and no UTF-8 body takes them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _split(pattern: re.Pattern[str], text: str, *, group: int = 1) -> Iterator[tuple[str, str | None]]:
    at = 0
    for match in pattern.finditer(text):
        yield text[at : match.start()], match[group]
        at = match.end()
    yield text[at:], None


def _units(parts: Sequence[_Part]) -> Iterator[tuple[object, int, int]]:
    """Parts as comparable units without white space, each with the position right behind it (part, offset in it)."""
    for index, part in enumerate(parts):
        if isinstance(part, str):
            for offset, character in enumerate(part):
                if not character.isspace():
                    yield character, index, offset + 1
        else:
            yield part, index + 1, 0


def _end_of_prefix(prefix: Sequence[_Part], whole: Sequence[_Part]) -> tuple[int, int] | None:
    """Where in ``whole`` ``prefix`` ends (part, offset in it), or ``None`` if it does not begin with it."""
    units = _units(whole)
    end = (0, 0)
    for wanted, _, _ in _units(prefix):
        unit, index, offset = next(units, (None, 0, 0))
        if unit != wanted:
            return None
        end = (index, offset)
    index, offset = end
    if prefix and isinstance(last := prefix[-1], str) and index < len(whole) and isinstance(here := whole[index], str):
        # nothing but white space was sampled: the white space that ends the prompt is not to come again
        trailing = last[len(last.rstrip()) :]
        if trailing and here.startswith(trailing, offset):
            return index, offset + len(trailing)
    return end
