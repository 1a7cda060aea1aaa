"""What servers answer, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator
from rlcore.errors import PolicyUnavailable, Throttled
from rlcore.types import FinishReason

__all__ = ["BaseUrl", "excerpt", "finish_reason", "header", "json_object", "refuse"]

_FINISHES = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "abort": FinishReason.ABORT,
}


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:30000 or http://[::1]:30000")
    return url.rstrip("/")


BaseUrl = Annotated[str, AfterValidator(_checked_url)]
"""An http or https URL without a slash at its end."""


def excerpt(body: str) -> str:
    """The first 200 characters of an answer, on one line."""
    text = " ".join(body.split())
    return text[:200] + ("…" if len(text) > 200 else "") or "(empty)"


def header(text: str) -> str:
    """An id as the value of a header, which takes ASCII alone."""
    return quote(text, safe=" !#$&'()*+,/:;=?@[]|~", errors="replace")


def finish_reason(raw: object) -> FinishReason:
    """Why an answer ended; whatever is not known is ``UNKNOWN``, never a clean end."""
    return _FINISHES.get(raw, FinishReason.UNKNOWN) if isinstance(raw, str) else FinishReason.UNKNOWN


def json_object(body: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a successful answer; NaN and infinities in it are read as such.

    Raises:
        PolicyUnavailable: it is something else (a proxy's page), or an error with status 200.
    """
    text = body.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
    except ValueError:
        raise PolicyUnavailable(f"{where}: not JSON: {excerpt(text)}") from None
    if not isinstance(answer, dict):
        raise PolicyUnavailable(f"{where}: not a JSON object: {excerpt(text)}")
    if answer.get("error") or answer.get("object") == "error":
        raise PolicyUnavailable(f"{where}: an error with status 200: {excerpt(_message(answer) or text)}")
    return answer


def refuse(status: int, headers: Mapping[str, str], body: bytes, where: str) -> NoReturn:
    """Raise for an answer whose status is not 200.

    Raises:
        Throttled: 429, or 503 where the server says that it did not begin (a full queue, ``Retry-After``).
        PolicyUnavailable: everything else.
    """
    text = body.decode("utf-8", "replace")
    try:
        message = _message(json.loads(text)) or text
    except ValueError:
        message = text
    said = f"{where}: status {status}: {excerpt(message)}"
    wait = _seconds(headers.get("retry-after"))
    if status == 429 or (status == 503 and (wait is not None or "queue is full" in message)):
        raise Throttled(said, retry_after=wait)
    raise PolicyUnavailable(said)


def _message(answer: object) -> str | None:
    """The message of an error body, in the shapes that servers use."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error", answer)
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        said = next((error[key] for key in ("message", "detail") if error.get(key)), None)
        return None if said is None else str(said)
    return None


def _seconds(header: str | None) -> float | None:
    """Seconds of a ``Retry-After``; a date or nonsense counts as none."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86400 else None
