"""The grader tells right from wrong from unknown."""

import asyncio

import pytest

from rlcore.errors import SandboxLost, VerifierUnavailable
from rlcore.testing.agent import ScriptedSandbox
from rlcore.testing.skeletons.grader import Skeleton
from rlcore.types import Task, Trajectory

TASK = Task(id="t", data={"content": "42"})


def grade(sandbox: ScriptedSandbox | None) -> float:
    """The verdict on what is in this sandbox."""
    grader = Skeleton(Skeleton.Config())
    return asyncio.run(grader.grade(TASK, sandbox, Trajectory("a", "t", "g"))).reward


def test_right_and_wrong() -> None:
    """By the content of the file."""
    sandbox = ScriptedSandbox()
    assert grade(sandbox) == 0.0
    sandbox.files["/app/answer.txt"] = b"41"
    assert grade(sandbox) == 0.0
    sandbox.files["/app/answer.txt"] = b"42\n"
    assert grade(sandbox) == 1.0


def test_no_verdict_is_not_zero() -> None:
    """What the infrastructure did is not the policy's fault."""
    with pytest.raises(VerifierUnavailable):
        grade(None)

    class Lost(ScriptedSandbox):
        async def read_file(self, path: str, *, max_bytes: int = 1) -> bytes:
            raise SandboxLost("gone")

    with pytest.raises(SandboxLost):
        grade(Lost())
