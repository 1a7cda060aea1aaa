"""Finished groups on their way to training. Age is a bound: what is older is never trained, and is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlcore.types import Group

__all__ = ["GroupBuffer"]


class GroupBuffer:
    """Holds finished groups until a step takes them. Its size is bounded by the scheduler, which never runs further
    ahead than the age bound allows.

    Args:
        max_age: largest difference between the version that is trained and the oldest version in a group.
        discard: called with each group that became too old.
    """

    def __init__(self, max_age: int, discard: Callable[[Group], None]) -> None:
        self._max_age = max_age
        self._discard = discard
        self._groups: list[Group] = []
        self._arrived = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._groups)

    async def put(self, group: Group) -> None:
        """Add a finished group."""
        async with self._arrived:
            self._groups.append(group)
            self._arrived.notify_all()

    async def take(self, count: int, version: int) -> list[Group]:
        """The next ``count`` groups, in the order they finished, none of them too old for ``version``."""
        async with self._arrived:
            while True:
                for group in [g for g in self._groups if self.age(g, version) > self._max_age]:
                    self._groups.remove(group)
                    self._discard(group)
                if len(self._groups) >= count:
                    taken, self._groups = self._groups[:count], self._groups[count:]
                    return taken
                await self._arrived.wait()

    @staticmethod
    def age(group: Group, version: int) -> int:
        """Versions between the oldest token in the group and ``version``."""
        oldest = group.min_policy_version
        return 0 if oldest is None else version - oldest
