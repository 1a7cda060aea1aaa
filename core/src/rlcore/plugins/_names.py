"""Names of plugins and offers, and what messages say about unknown ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

import pluggy

from rlcore.errors import PluginError, RlcoreError

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)*([A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w.+!-]*))?", re.ASCII)


def canonical(name: str) -> tuple[str, str | None]:
    """The normal form of a name and the version it asks for.

    ``my_env``, ``My-Env`` and ``own/my-env@0.1.5`` are one name; ``../x`` and ``a;b`` are none.

    Raises:
        PluginError: it is not a name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise PluginError(
            f"{name!r} is not a name: letters, digits, '-', '_' and '.', as in 'my-env' or 'owner/my-env@1.0'"
        )
    return key_of(match[1]), match[2]


def key_of(name: str) -> str:
    """What spellings of one name have in common."""
    return re.sub(r"[-_.]+", "-", name).lower()


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or what there is, or nothing: the tail of a message about an unknown name."""
    known = sorted(set(known))
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is: {', '.join(known)}" if known else ""


def origin(plugin: str, distribution: str, version: str) -> str:
    """As messages name a plugin."""
    if not plugin:
        return "no plugin"
    return f"{plugin} ({distribution} {version})" if distribution else plugin


def reason(error: BaseException) -> str:
    """What was raised, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, (RlcoreError, pluggy.PluginValidationError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
