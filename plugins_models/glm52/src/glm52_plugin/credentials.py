"""Where the credentials of a run are; never what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcore.config import Secret

if TYPE_CHECKING:
    from rlcore.config import RunConfig

__all__ = ["PROVIDERS", "credentials"]

PROVIDERS = {"daytona": ("DAYTONA_API_KEY",), "modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")}
"""Variables that a provider's SDK reads, by the name of the sandbox backend."""


def credentials(run: RunConfig) -> Iterator[str]:
    """Names of variables, and paths of files (these hold a ``/`` or a ``.``)."""
    if run.sandbox is not None and getattr(run.sandbox.options, "api_key", None) is None:
        yield from PROVIDERS.get(run.sandbox.name.rpartition(":")[2], ())
    for section in (run.sandbox, run.policy, *run.trackers):
        options = section and section.options
        for name in type(options).model_fields if options is not None else ():
            value = getattr(options, name)
            if isinstance(value, Secret):
                yield value.env or str(value.file)
