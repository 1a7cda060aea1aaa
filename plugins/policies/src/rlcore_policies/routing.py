"""Which engine a session goes to: the one with the fewest sessions, and always the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from rlcore.errors import PolicyUnavailable

__all__ = ["Router"]


class Router:
    """Spreads sessions over engines.

    Args:
        engines: base URLs.
        rest_seconds: how long an engine that failed gets nothing.
        clock: monotonic seconds.
    """

    def __init__(self, engines: Sequence[str], *, rest_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._sessions: dict[str, set[str]] = {engine: set() for engine in engines}
        self._engine_of: dict[str, str] = {}
        self._resting: dict[str, float] = {}
        self._rest_seconds = rest_seconds
        self._clock = clock

    def route(self, session_id: str) -> str:
        """The engine of a session; a session whose engine failed moves to another.

        Raises:
            PolicyUnavailable: every engine failed a moment ago.
        """
        alive = [engine for engine in self._sessions if self._resting.get(engine, 0.0) <= self._clock()]
        engine = self._engine_of.get(session_id)
        if engine in alive:
            return engine
        if not alive:
            raise PolicyUnavailable(f"no engine answers: {', '.join(self._sessions)}")
        self.release(session_id)
        engine = min(alive, key=lambda candidate: len(self._sessions[candidate]))
        self._engine_of[session_id] = engine
        self._sessions[engine].add(session_id)
        return engine

    def release(self, session_id: str) -> None:
        """A session ended."""
        if (engine := self._engine_of.pop(session_id, None)) is not None:
            self._sessions[engine].discard(session_id)

    def failed(self, engine: str) -> None:
        """An engine does not answer: it gets nothing for a while."""
        self._resting[engine] = self._clock() + self._rest_seconds

    def answered(self, engine: str) -> None:
        """An engine answers (again)."""
        self._resting.pop(engine, None)
