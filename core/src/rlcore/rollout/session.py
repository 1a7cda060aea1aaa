"""One conversation with the policy: token-exact, within a budget, every request sent once and accounted for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from random import uniform
from time import monotonic
from zlib import crc32

from rlcore.errors import InfraError, PolicyUnavailable, Throttled
from rlcore.protocols import PolicyClient, Renderer, RoutingClient, WindowedClient
from rlcore.rollout.budget import BudgetExhausted, Meter
from rlcore.rollout.ledger import RequestLedger
from rlcore.rollout.render import visible
from rlcore.types import (
    Budget,
    BudgetLeft,
    Completion,
    EndReason,
    FinishReason,
    Message,
    ModelRequest,
    Reply,
    Sampling,
    Turn,
)

__all__ = ["BudgetExhausted", "Session"]

GRACE = 10.0
"""Seconds that a client gets beyond the attempt's clock to abort its request, before it is cancelled."""
TICK = 0.01
"""Less than this is no time left: timers may fire a little early."""
THROTTLE_RETRIES = 8
THROTTLE_CAP = 30.0
"""Longest wait in seconds before a refused request is sent again, unless the server names one."""
LOWEST_LOGPROB = -1000.0
"""Below this an engine did not measure but fill in (−9999)."""
ROUNDING = 1e-5
"""A log-prob may be above 0 by the rounding of a float32 log-softmax; it is stored as 0."""


class Session:
    """Implements :class:`rlcore.protocols.Session`; made by the episode runner, one for each attempt.

    The ids that the engine sampled are kept and never encoded again. The next prompt is the ids so far and those of the
    new messages; where the template would rewrite the past, the whole conversation is rendered as a new prompt: a new
    row, in which nothing before the next completion was sampled. ``turns`` says it all: a turn whose prompt begins with
    the previous turn's prompt and completion lies in the same row.

    With a client without a renderer the conversation goes as messages and the answers have no ids: evaluation only.
    Prompts are then counted by the server, new messages by a quarter of their bytes until it has.

    Args:
        client: asks the model.
        ledger: gets every request before it is sent.
        session_id: the same for every turn: the routing key.
        sampling: how to sample; a seed is varied by session and turn, or siblings would be copies.
        budget: its clock starts now; its tokens are never more than the model takes, where the client knows that.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: PolicyClient,
        *,
        ledger: RequestLedger,
        session_id: str,
        sampling: Sampling,
        budget: Budget,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._id = session_id
        self._sampling = sampling
        self._clock = clock
        window = client.context_length if isinstance(client, WindowedClient) else None
        if window is not None and window < budget.tokens_per_session:
            budget = replace(budget, tokens_per_session=window)
        self._meter = Meter(budget, clock)
        self._messages: list[Message] = []
        self._turns: list[Turn] = []
        self._answered_at = 0.0
        self._asking = False

    @property
    def turns(self) -> Sequence[Turn]:
        """The answered turns in order."""
        return self._turns

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._messages

    @property
    def _where(self) -> str:
        return f"session {self._id}, turn {len(self._turns)}"

    def _new_id(self) -> str:
        return f"{self._id}-{len(self._turns)}-{secrets.token_hex(4)}"

    @property
    def left(self) -> BudgetLeft:
        """What is left of the budget."""
        return self._meter.left

    async def ask(self, new_messages: Sequence[Message]) -> Reply:
        """Add messages, sample one turn, return it.

        Raises:
            BudgetExhausted: no token, turn or second is left, or the new messages leave no room; nothing was sent. Or
                the clock ran out during the call; the request was aborted.
            PolicyUnavailable: no usable answer; what came of it is not kept. Names the session and the turn. A request
                that was refused before it began (``Throttled``) is sent again, later and under another id, first.
        """
        if self._asking:
            raise RuntimeError(f"session {self._id}: a second question before the answer to the first")
        self._asking = True
        try:
            self._observe(new_messages)
            self._meter.open_turn()
            request = self._request(new_messages)
            started = self._clock()
            request, completion = await self._send(request)
        finally:
            self._asking = False
        self._answered_at = self._clock()
        said = completion.message or Message("assistant", completion.text)
        self._messages += [*new_messages, said]
        self._turns.append(
            Turn(
                prompt_ids=tuple(request.prompt_ids or ()),
                completion=completion,
                generation_seconds=self._answered_at - started,
            )
        )
        self._meter.close_turn(_context(request, completion))
        return Reply(text=visible(completion.text), finish_reason=completion.finish_reason, message=said)

    def close(self) -> None:
        """The attempt is over: the client may give the session's engine to another."""
        if isinstance(self._client, RoutingClient):
            self._client.release(self._id)

    def _observe(self, new_messages: Sequence[Message]) -> None:
        if self._turns:
            self._turns[-1] = replace(
                self._turns[-1],
                observation=tuple(new_messages),
                tool_seconds=self._clock() - self._answered_at,
            )

    def _request(self, new_messages: Sequence[Message]) -> ModelRequest:
        renderer = self._client.renderer
        turn = len(self._turns)
        seed = self._sampling.seed
        if seed is not None:
            seed = crc32(f"{seed}:{self._id}:{turn}".encode("utf-8", "replace"))
        prompt_ids = None if renderer is None else self._prompt(renderer, new_messages)
        prompt_tokens = self._guess(new_messages) if prompt_ids is None else len(prompt_ids)
        return ModelRequest(
            id=self._new_id(),
            session_id=self._id,
            max_tokens=self._meter.cap(prompt_tokens),
            sampling=replace(self._sampling, seed=seed),
            seconds=self._meter.left.seconds,
            prompt_ids=prompt_ids,
            messages=(*self._messages, *new_messages),
        )

    def _prompt(self, renderer: Renderer, new_messages: Sequence[Message]) -> tuple[int, ...]:
        if self._turns:
            last = self._turns[-1]
            behind = renderer.extend(self._messages[:-1], last.completion, new_messages)
            if behind is not None:
                return (*last.prompt_ids, *last.completion.token_ids, *behind)
        return tuple(renderer.render([*self._messages, *new_messages]))

    def _guess(self, new_messages: Sequence[Message]) -> int:
        before = 0
        if self._turns:
            last = self._turns[-1].completion
            before = last.prompt_tokens + last.completion_tokens
        return before + sum(len(message.content.encode("utf-8", "replace")) // 4 for message in new_messages)

    async def _send(self, request: ModelRequest) -> tuple[ModelRequest, Completion]:
        """Send, and once more under another id each time the server refuses before it begins; the request that counts."""
        for attempt in range(THROTTLE_RETRIES + 1):
            try:
                return request, await self._send_once(request)
            except Throttled as error:
                wait = error.retry_after
                if wait is None:
                    wait = min(THROTTLE_CAP, 2**attempt) * uniform(0.5, 1)
                left = self._meter.left.seconds
                if attempt == THROTTLE_RETRIES or wait >= left:
                    raise PolicyUnavailable(
                        f"{self._where}: refused {attempt + 1} times, {left:.0f} s are left: {error}"
                    ) from error
            await asyncio.sleep(wait)
            request = replace(request, id=self._new_id(), seconds=self._meter.left.seconds)
        raise AssertionError("the last attempt returns or raises")

    async def _send_once(self, request: ModelRequest) -> Completion:
        self._ledger.intent(request, turn=len(self._turns), new_row=self._begins_a_row(request))
        completion: Completion | None = None
        try:
            self._ledger.opened(request.id)
            async with asyncio.timeout(request.seconds + GRACE):
                completion = await self._client.complete(request)
            usable = self._usable(completion, request)
        except (InfraError, TimeoutError) as error:
            sampled = None if completion is None else _sampled(completion)
            if self._meter.left.seconds < TICK:
                self._ledger.cancelled(request.id)
                raise BudgetExhausted(
                    EndReason.TIMEOUT, f"{self._where}: the attempt's time is over: {error}"
                ) from error
            if completion is not None and completion.finish_reason is FinishReason.ABORT:
                self._ledger.aborted(request.id, tokens=sampled)
            else:
                self._ledger.failed(request.id, f"{type(error).__name__}: {error}", tokens=sampled)
            if isinstance(error, Throttled):
                raise
            raise PolicyUnavailable(f"{self._where}: {error}") from error
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._ledger.cancelled(request.id)
            else:
                self._ledger.failed(request.id, f"{type(error).__name__}: {error}")
            raise
        self._ledger.answered(request.id, tokens=_sampled(usable), policy_version=usable.policy_version)
        return usable

    def _begins_a_row(self, request: ModelRequest) -> bool:
        """Whether the template rewrote what the turn before was sampled after."""
        if not self._turns or request.prompt_ids is None:
            return False
        last = self._turns[-1]
        before = (*last.prompt_ids, *last.completion.token_ids)
        return tuple(request.prompt_ids[: len(before)]) != before

    def _usable(self, completion: Completion, request: ModelRequest) -> Completion:
        """The completion within the cap and with its text, or ``PolicyUnavailable``."""
        if completion.finish_reason is FinishReason.ABORT:
            raise PolicyUnavailable("the engine aborted the request")
        if completion.finish_reason is FinishReason.UNKNOWN:
            raise PolicyUnavailable("the engine did not say why the answer ended")
        renderer = self._client.renderer
        if renderer is None or request.prompt_ids is None:
            return completion
        ids, logprobs = completion.token_ids, completion.logprobs
        if not ids:
            raise PolicyUnavailable("the engine gave no token ids")
        if len(logprobs) != len(ids):
            raise PolicyUnavailable(f"the engine gave {len(ids)} token ids and {len(logprobs)} log-probs")
        if completion.prompt_tokens and completion.prompt_tokens != len(request.prompt_ids):
            raise PolicyUnavailable(
                f"the engine sampled after {completion.prompt_tokens} tokens; {len(request.prompt_ids)} were sent"
            )
        for position, logprob in enumerate(logprobs):
            if not _measured(logprob):
                raise PolicyUnavailable(f"the log-prob of token {position} is {logprob!r}")
        finish = completion.finish_reason
        if len(ids) > request.max_tokens:
            ids, logprobs, finish = ids[: request.max_tokens], logprobs[: request.max_tokens], FinishReason.LENGTH
        return replace(
            completion,
            token_ids=tuple(ids),
            logprobs=tuple(min(0.0, float(logprob)) for logprob in logprobs),
            finish_reason=finish,
            text=renderer.decode(ids),
            message=None,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(ids),
        )


def _measured(logprob: object) -> bool:
    """Whether a value can be the log-prob of a token that was sampled."""
    if not isinstance(logprob, Real) or isinstance(logprob, bool):
        return False
    return LOWEST_LOGPROB < float(logprob) <= ROUNDING  # false for NaN too


def _sampled(completion: Completion) -> int:
    return max(completion.completion_tokens, len(completion.token_ids))


def _context(request: ModelRequest, completion: Completion) -> int:
    if request.prompt_ids is not None:
        return len(request.prompt_ids) + len(completion.token_ids)
    return completion.prompt_tokens + completion.completion_tokens
