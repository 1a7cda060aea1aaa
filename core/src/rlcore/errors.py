"""The error tree: whose fault it is decides what happens next.

A message says what was wrong, where (file and key, or plugin and distribution) and what to do. The command line prints
the message of an :class:`RlcoreError` as one readable error and exits with the ``exit_code`` of its class.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "InfraError",
    "PluginError",
    "PolicyUnavailable",
    "RlcoreError",
    "RunFailed",
    "SandboxLost",
    "TaskError",
    "Throttled",
    "VerifierUnavailable",
]


class RlcoreError(Exception):
    """Base of every error that rlcore raises on purpose."""

    exit_code = 1


class ConfigError(RlcoreError):
    """The configuration is wrong: an unknown key, a wrong type, options that contradict each other."""

    exit_code = 2


class PluginError(RlcoreError):
    """A plugin is missing, broken, or in conflict with another; names the plugin and its distribution."""

    exit_code = 2


class TaskError(RlcoreError):
    """A task folder or data row is wrong; names the file and the key."""

    exit_code = 2


class RunFailed(RlcoreError):
    """A run that was started correctly could not go on (a full disk, nothing left to train on)."""


class InfraError(RlcoreError):
    """The infrastructure failed, not the policy: retried or dropped and counted, never a reward."""


class Throttled(InfraError):
    """A provider refused for now (rate limit, quota, capacity).

    Attributes:
        retry_after: seconds that the provider asked to wait, or ``None`` if it did not say.
        quota: whether a quota is used up, which ends when something is freed; a rate limit ends with time.
        cpus: cores that the quota allows in all, or ``None`` if the provider did not say.
    """

    def __init__(
        self, message: str, *, retry_after: float | None = None, quota: bool = False, cpus: float | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after, self.quota, self.cpus = retry_after, quota, cpus


class SandboxLost(InfraError):
    """The sandbox is gone (as opposed to: a command in it failed)."""


class PolicyUnavailable(InfraError):
    """The engine did not give a usable completion: no answer, an error, ids without log-probs, an abort."""


class VerifierUnavailable(InfraError):
    """The verifier gave no verdict (crashed, timed out, wrote nothing): the reward is ``None``, not 0."""
