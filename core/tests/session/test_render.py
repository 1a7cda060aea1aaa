"""The renderer's own rules, over a tokenizer of characters."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rlcore.errors import ConfigError
from rlcore.protocols import Renderer
from rlcore.rollout.render import ChatRenderer, scrub, visible
from rlcore.types import Message


def test_it_is_a_renderer_and_knows_its_end_of_turn(open_session: Any, say: Any) -> None:
    _, client, _ = open_session([])
    renderer = client.renderer
    assert isinstance(renderer, Renderer)
    controls = renderer.tokenizer.controls
    assert renderer.end_ids == {controls["<e>"], controls["<eos>"]}
    assert renderer.decode(say("x</think>y<e><eos>").token_ids) == "x</think>y"


@pytest.mark.fault("MASK-02")
def test_a_tokenizer_that_lets_a_control_token_through_is_found_out(open_session: Any) -> None:
    _, client, _ = open_session([])
    tokenizer = client.renderer.tokenizer

    class Leaky:
        name, controls, stops, decode, apply_template = (
            "leaky", tokenizer.controls, tokenizer.stops, tokenizer.decode, tokenizer.apply_template,
        )  # fmt: skip

        def encode(self, pieces: Sequence[str | int]) -> list[int]:
            return [i for p in pieces for i in ([p] if isinstance(p, int) else [self.controls["<e>"], *map(ord, p)])]

    with pytest.raises(ConfigError, match="leaky: plain text was encoded as control tokens"):
        ChatRenderer(Leaky()).render([Message("user", "x")])  # type: ignore[arg-type]


@pytest.mark.fault("MASK-02")
def test_text_that_only_together_with_the_template_spells_a_marker_stays_text(open_session: Any) -> None:
    def glued(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        return "".join(f"<{m['content']}>{m.get('note', '')}e>" for m in messages)

    _, client, _ = open_session([], template=glued)
    ids = client.renderer.render([Message("user", "s"), Message("user", "x", {"note": "<"})])
    assert not set(ids) & set(client.renderer.tokenizer.controls.values())


def test_a_template_without_a_marker_behind_the_answer_has_no_end_of_turn(open_session: Any, say: Any) -> None:
    def bare(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + ("assistant:" if prompt else "")

    _, client, _ = open_session([], template=bare)
    renderer = client.renderer
    assert renderer.end_ids == {renderer.tokenizer.controls["<eos>"]}
    behind = renderer.extend([Message("user", "a")], say(" x<eos>"), [Message("user", "b")])
    assert renderer.tokenizer.decode(behind) == "\nuser: b\nassistant:"


def test_a_template_that_opens_the_thinking_and_gives_it_back_keeps_the_row(open_session: Any, say: Any) -> None:
    def opens(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        def said(m: Mapping[str, Any]) -> str:
            head, closed, tail = m["content"].partition("</think>")
            return f"<think>\n{head.strip()}\n</think>\n\n{tail.strip()}" if closed else m["content"]

        text = "".join(f"<s>{m['role']}\n{said(m)}<e>\n" for m in messages)
        return text + ("<s>assistant\n<think>\n" if prompt else "")

    _, client, _ = open_session([], template=opens)
    renderer = client.renderer
    behind = renderer.extend([Message("user", "a")], say("hm </think>do<e>"), [Message("user", "b")])
    assert renderer.tokenizer.decode(behind) == "\n<s>user\nb<e>\n<s>assistant\n<think>\n"
    assert renderer.extend([Message("user", "a")], say("never closed<e>"), [Message("user", "b")]) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [("ls", "ls"), ("hm</think>\n\nls", "ls"), ("<think>a</think>b</think>c\n", "c\n"), ("hm</think>", ""), ("", "")],
)
def test_thinking_is_not_what_was_said(text: str, said: str) -> None:
    assert visible(text) == said


@pytest.mark.fault("OBS-08")
def test_lone_surrogates_are_replaced() -> None:
    assert scrub("a\ud800b") == "a\ufffdb"
    assert scrub("\U0001f600é\x00") == "\U0001f600é\x00"
