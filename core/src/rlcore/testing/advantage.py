"""Conformance of an advantage estimator."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rlcore.testing._checks import close, refused
from rlcore.types import Completion, FinishReason, Group, Message, Task, Trajectory, Turn

__all__ = ["AdvantageConformance"]


class AdvantageConformance:
    """Subclass it in a test module, name the estimator, and write its formula for one group in plain Python.

    ::

        class TestMyEstimator(AdvantageConformance):
            estimator = MyEstimator

            def group(self, members):
                mean = sum(m.reward for m in members) / len(members)
                return [m.reward - mean for m in members]
    """

    estimator: ClassVar[type]
    options: ClassVar[Mapping[str, Any]] = {}

    needs_contrast: ClassVar[bool] = True
    """Whether equal rewards in a group leave nothing to learn (advantage 0 or no entry)."""

    rewards: ClassVar[Sequence[float]] = (0.0, 1.0, 0.5, 0.25, 3.0, -1.0, 0.1, 1 / 3)
    """Rewards that are drawn."""

    # --- the reference, written by the author

    def group(self, members: Sequence[Trajectory]) -> Sequence[float | Sequence[float]]:
        """Advantages of the members of one group that have a verdict: a number, or one for each turn."""
        raise NotImplementedError("write the formula of one group, or override step()")

    def step(self, groups: Sequence[Sequence[Trajectory]]) -> Sequence[Sequence[float | Sequence[float]]]:
        """The same for all groups of a step; override it for estimators that join groups."""
        return [self.group(members) for members in groups]

    def info(self, rng: random.Random, turns: int) -> dict[str, Any]:
        """What an agent loop must have put into ``info`` for this estimator."""
        return {}

    # --- the machine

    def make(self) -> Any:
        """A new instance with ``options``."""
        return self.estimator(self.estimator.Config(**self.options))  # type: ignore[attr-defined]

    def trajectory(self, name: str, reward: float | None, rng: random.Random, turns: int = 1) -> Trajectory:
        """An attempt of so many turns, of one to five tokens each."""
        made = []
        for index in range(turns):
            tokens = rng.randrange(1, 6)
            completion = Completion((7,) * tokens, (-1.0,) * tokens, FinishReason.STOP, completion_tokens=tokens)
            made.append(Turn((1, index), completion, (Message("user", f"seen {rng.randrange(2)}"),)))
        return Trajectory(name, "task", "group", turns=made, reward=reward, info=self.info(rng, turns))

    def made_group(self, rewards: Sequence[float | None], rng: random.Random, name: str = "g") -> Group:
        """A group with these rewards."""
        trajectories = [
            self.trajectory(f"{name}/{i}", reward, rng, rng.randrange(1, 4)) for i, reward in enumerate(rewards)
        ]
        return Group(name, Task("task"), trajectories)

    def random_groups(self, seed: int) -> list[Group]:
        """Groups of all sizes, some without a verdict in part or at all, all of tasks with one id."""
        rng = random.Random(seed)
        groups = []
        for number in range(rng.randrange(1, 5)):
            drawn = [rng.choice([*self.rewards, None]) for _ in range(rng.randrange(0, 7))]
            if rng.random() < 0.2:
                drawn = [drawn[0] if drawn else None] * len(drawn)
            groups.append(self.made_group(drawn, rng, f"g{number}"))
        return groups

    def compare(self, groups: Sequence[Group], what: str) -> None:
        """Fail unless the advantages are those of the reference; an entry that is missing counts as 0."""
        found = self.make()(groups)
        inside = [[t for t in group.trajectories if t.reward is not None] for group in groups]
        for members, wanted in zip(inside, self.step(inside), strict=True):
            for member, value in zip(members, wanted, strict=True):
                self.same(found.get(member.id, 0.0), value, member, f"{what}: {member.id}")
        known = {member.id for members in inside for member in members}
        assert set(found) <= known, f"{what}: entries without a verdict: {sorted(set(found) - known)}"

    @staticmethod
    def same(found: float | Sequence[float], wanted: float | Sequence[float], member: Trajectory, what: str) -> None:
        """Fail unless equal, turn by turn."""

        def turns(value: float | Sequence[float]) -> list[float]:
            return [float(value)] * len(member.turns) if isinstance(value, int | float) else [float(v) for v in value]

        left, right = turns(found), turns(wanted)
        assert len(left) == len(right) == len(member.turns), f"{what}: {len(left)} advantages for {len(right)} turns"
        for a, b in zip(left, right, strict=True):
            close(a, b, what)

    # --- what is checked

    def test_agrees_with_the_scalar_reference(self) -> None:
        """On groups of all sizes, with missing verdicts."""
        for seed in range(200):
            self.compare(self.random_groups(seed), f"seed {seed}")

    def test_no_verdict_is_not_zero(self) -> None:
        """Taking an attempt without a verdict away changes nothing."""
        for seed in range(50):
            groups = self.random_groups(seed)
            found = self.make()(groups)
            bare = [Group(g.id, g.task, [t for t in g.trajectories if t.reward is not None]) for g in groups]
            assert dict(self.make()(bare)) == dict(found), "an attempt without a verdict has an influence"
        assert not self.make()([self.made_group([None] * 4, random.Random(0))])

    def test_groups_of_one_and_equal_rewards(self) -> None:
        """Finite always; where contrast is needed, 0 or no entry, whatever rounding leaves in the deviation."""
        for reward in (0.7, 0.1, 1 / 3, 1.0, 0.0):
            for size in range(1, 11):
                group = self.made_group([reward] * size, random.Random(size))
                for name, value in self.make()([group]).items():
                    for number in [value] if isinstance(value, int | float) else value:
                        assert math.isfinite(number), f"{name}: {number}"
                        assert not self.needs_contrast or abs(number) < 1e-6, (
                            f"{size} rewards of {reward} are no contrast, but the advantage is {number}"
                        )

    def test_order_does_not_matter(self) -> None:
        """Of the groups, nor of their members."""
        for seed in range(20):
            groups = self.random_groups(seed)
            rng = random.Random(seed)
            shuffled = [Group(g.id, g.task, rng.sample(g.trajectories, len(g.trajectories))) for g in groups]
            rng.shuffle(shuffled)
            found, other = self.make()(groups), self.make()(shuffled)
            assert set(found) == set(other)
            for group in groups:
                for member in group.trajectories:
                    if member.id in found:
                        self.same(other[member.id], found[member.id], member, "shuffled")

    def test_input_is_left_as_it_was(self) -> None:
        """Nothing is written into groups or attempts."""
        groups = self.random_groups(3)
        before = copy.deepcopy(groups)
        self.make()(groups)
        assert groups == before, "the estimator changed its input"

    def test_rewards_that_are_not_numbers_are_refused(self) -> None:
        """NaN and inf end in an error that names the attempt, never in an advantage."""
        for reward in (math.nan, math.inf, -math.inf):
            group = self.made_group([1.0, reward, 0.0], random.Random(0))
            refused(f"a reward of {reward}", partial(self.make(), [group]), "g/1")

    def test_one_attempt_with_two_rewards_is_refused(self) -> None:
        """Never one of them, silently."""
        group = self.made_group([1.0, 0.0, 1.0], random.Random(0))
        group.trajectories[1].id = group.trajectories[0].id
        refused("one attempt with two rewards", partial(self.make(), [group]), "g/0")
