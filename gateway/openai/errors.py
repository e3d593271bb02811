"""Replicas' errors in the one shape that clients read: `message`, `type`, `param` and `code`, all four always.

Engines leave keys out, put the status into `code`, name types in their own way, or answer in plain text. An error that
is in shape already is passed on byte for byte.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine_worker.contract.errors import ApiError, default_type

_OVERFLOW = re.compile(r"maximum context length|context_length_exceeded|exceeds? the (available )?context size", re.I)
_OPENAI_TYPE = re.compile(r"[a-z]+(_[a-z]+)+")
_KEYS = frozenset({"message", "type", "param", "code"})
_MAX_TEXT = 2000


def error_of(error: Any, status: int) -> ApiError:
    """An error object of any shape in use, or a text."""
    fields = error if isinstance(error, dict) else {"message": error}

    def text(name: str) -> str | None:
        value = fields.get(name)
        return value if isinstance(value, str) and value else None

    message = text("message") or text("detail") or f"The replica failed ({status})."
    code = text("code")
    if code is None and status in (400, 413) and _OVERFLOW.search(message):
        code = "context_length_exceeded"
    kind = text("type")
    if kind is None or not _OPENAI_TYPE.fullmatch(kind):
        kind = default_type(status)
    return ApiError(status, message[:_MAX_TEXT], type=kind, param=text("param"), code=code)


def error_in(body: bytes, status: int) -> ApiError:
    """The error that an answer's body tells."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return error_of(None, status)  # a page of some server in between: not for the client
    if isinstance(data, dict):
        return error_of(data.get("error") or data, status)
    return error_of(data, status)


def in_shape(body: bytes) -> bool:
    """Whether a body is an error as clients expect it."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    error = data.get("error") if isinstance(data, dict) else None
    return (
        isinstance(error, dict)
        and error.keys() >= _KEYS
        and isinstance(error["message"], str)
        and isinstance(error["code"], str | None)
        and isinstance(error["type"], str)
        and _OPENAI_TYPE.fullmatch(error["type"]) is not None
    )
