"""What one attempt may still use."""

from __future__ import annotations

from collections.abc import Callable

from rlcore.errors import RlcoreError
from rlcore.types import Budget, BudgetLeft, EndReason

__all__ = ["BudgetExhausted", "Meter"]


class BudgetExhausted(RlcoreError):
    """No token, turn or second is left; nothing was sent.

    Attributes:
        reason: ``BUDGET`` (tokens), ``MAX_TURNS`` or ``TIMEOUT``.
    """

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Meter:
    """Counts one attempt against its :class:`Budget`; the clock starts with it."""

    def __init__(self, budget: Budget, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._deadline = clock() + budget.seconds
        self._turns = 0
        self._context = 0

    @property
    def left(self) -> BudgetLeft:
        """What is left; never negative."""
        return BudgetLeft(
            tokens=max(0, self._budget.tokens_per_session - self._context),
            turns=max(0, self._budget.turns - self._turns),
            seconds=max(0.0, self._deadline - self._clock()),
        )

    def open_turn(self) -> None:
        """Raise if no turn or no second is left."""
        left = self.left
        if not left.turns:
            raise BudgetExhausted(EndReason.MAX_TURNS, f"all {self._budget.turns} turns are used")
        if not left.seconds:
            raise BudgetExhausted(EndReason.TIMEOUT, f"the {self._budget.seconds:g} s of the attempt are over")

    def cap(self, prompt_tokens: int) -> int:
        """How many tokens the next turn may sample after a prompt of this length: at least 1, or it raises."""
        room = self._budget.tokens_per_session - prompt_tokens
        if room < 1:
            raise BudgetExhausted(
                EndReason.BUDGET,
                f"the next prompt has {prompt_tokens} tokens; the session may have {self._budget.tokens_per_session}",
            )
        return min(self._budget.tokens_per_turn, room)

    def close_turn(self, context_tokens: int) -> None:
        """A turn was answered; prompt and answer now have ``context_tokens`` together."""
        self._turns += 1
        self._context = context_tokens
