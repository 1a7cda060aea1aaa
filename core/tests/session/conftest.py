"""A tokenizer of single characters, chat templates as functions, and a policy that answers by script."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.render import ChatRenderer, Piece
from rlcore.rollout.session import Session
from rlcore.types import Budget, Completion, FinishReason, Message, ModelRequest, RunContext, Sampling

MARKERS = ["<s>", "<e>", "<think>", "</think>", "<eos>"]
CONTROLS = {marker: 0x200000 + n for n, marker in enumerate(MARKERS)}


def chatml(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    text = "".join(f"<s>{m['role']}\n{m['content']}<e>\n" for m in messages)
    return text + ("<s>assistant\n" if prompt else "")


def forgetful(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    """Cuts the thinking of every assistant's message when another message follows."""

    def said(m: Mapping[str, Any], last: bool) -> str:
        cut = m["role"] == "assistant" and not last
        return m["content"].split("</think>")[-1] if cut else m["content"]

    last = len(messages) - 1
    text = "".join(f"<s>{m['role']}\n{said(m, n == last)}<e>\n" for n, m in enumerate(messages))
    return text + ("<s>assistant\n" if prompt else "")


@dataclass
class Characters:
    """One id per character; markers have ids of their own, and "ab" merges into one id as BPE merges do."""

    template: Callable[[Sequence[Mapping[str, Any]], bool], str] = chatml
    name: str = "characters"
    controls: Mapping[str, int] = field(default_factory=lambda: CONTROLS)
    stops: frozenset[int] = frozenset([CONTROLS["<eos>"]])

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            text = piece.replace("ab", "\U00100000")
            ids.extend(map(ord, text))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {number: marker for marker, number in self.controls.items()}
        return "".join(names.get(i) or chr(i) for i in token_ids).replace("\U00100000", "ab")

    def apply_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        return self.template(messages, add_generation_prompt)


def sample(text: str, finish: FinishReason = FinishReason.STOP, *, version: int = 0) -> Completion:
    """As an engine gives it: one id per character (never merged), markers as control tokens, a log-prob for each."""
    ids: list[int] = []
    while text:
        marker = next((m for m in MARKERS if text.startswith(m)), None)
        ids.append(CONTROLS[marker] if marker else ord(text[0]))
        text = text[len(marker) if marker else 1 :]
    return Completion(tuple(ids), tuple(-0.01 * (n + 1) for n in range(len(ids))), finish, policy_version=version)


@dataclass
class Scripted:
    """A policy client that gives the next item of a script: a completion, an error to raise, or a wait for ever."""

    script: list[Any]
    renderer: ChatRenderer | None
    requests: list[ModelRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    works_on: set[str] = field(default_factory=set)

    async def start(self, context: RunContext) -> None: ...

    async def complete(self, request: ModelRequest) -> Completion:
        self.requests.append(request)
        step = self.script.pop(0)
        if isinstance(step, BaseException):
            raise step
        if step == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append(request.id)
        if callable(step):
            return step(request)
        return step

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.works_on.discard(request_id)

    async def running(self) -> frozenset[str] | None:
        return frozenset(self.works_on)

    async def aclose(self) -> None: ...


ROOMY = Budget(tokens_per_turn=1000, tokens_per_session=10_000, turns=10, seconds=60.0)


class Clock:
    """Seconds that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_session(clock: Clock) -> Callable[..., tuple[Session, Scripted, RequestLedger]]:
    """Opens a session over a script; gives the client and the ledger with it."""

    def make(
        script: Iterable[Any],
        *,
        template: Callable[..., str] = chatml,
        budget: Budget = ROOMY,
        messages: bool = False,
        seed: int | None = None,
        session_id: str = "s1",
        ledger: RequestLedger | None = None,
        real_clock: bool = False,
    ) -> tuple[Session, Scripted, RequestLedger]:
        client = Scripted(list(script), None if messages else ChatRenderer(Characters(template)))
        ledger = ledger or RequestLedger()
        extra = {} if real_clock else {"clock": clock}
        session = Session(
            client, ledger=ledger, session_id=session_id, sampling=Sampling(seed=seed), budget=budget, **extra
        )
        return session, client, ledger

    return make


@pytest.fixture
def say() -> Callable[..., Completion]:
    """Makes a completion from text with markers."""
    return sample


@pytest.fixture
def templates() -> dict[str, Callable[..., str]]:
    """Chat templates by name."""
    return {"chatml": chatml, "forgetful": forgetful}


@pytest.fixture
def user() -> Callable[[str], list[Message]]:
    """A user's message alone."""
    return lambda text: [Message("user", text)]
