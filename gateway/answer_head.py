"""The head of a replica's answer, and what the gateway makes of it."""

from __future__ import annotations

from collections.abc import Iterable

RawHeaders = Iterable[tuple[bytes, bytes]]
_NOT_RETURNED = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"content-length", b"date", b"server", b"set-cookie", b"x-request-id", b"alt-svc"}
)
MAX_TOKENS = 10**8  # of one request, in or out: what says more is wrong
_CACHED_TOKENS = b"x-warmgate-cached-tokens"
_MAX_DIGITS = 9


def returned(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """What goes back to the client of a replica's headers: lower case, none hop-by-hop, none of the gateway's own."""
    return [pair for pair in headers if pair[0] not in _NOT_RETURNED and not pair[0].startswith(b"x-warmgate-")]


def cached_tokens_in(headers: RawHeaders) -> int | None:
    """What a replica's headers say that it reused; None where they don't, or say what can't be."""
    value = next((value for name, value in headers if name == _CACHED_TOKENS), b"")
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        return None
    cached = int(value)
    return cached if cached <= MAX_TOKENS else None


class AnswerHead:
    """`headers` as they came, in lower case, and what follows from them. Not to be changed: answers share one.

    lines     those that go back to the client
    is_coded  the body is not what it says, but an encoding of that
    """

    __slots__ = ("cached_tokens", "headers", "is_coded", "keep_alive", "lines", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], keep_alive: bool) -> None:
        self.status = status
        self.headers = headers
        self.keep_alive = keep_alive
        self.lines = b"".join(b"%b: %b\r\n" % pair for pair in returned(headers))
        self.cached_tokens = cached_tokens_in(headers)
        self.is_coded = any(name == b"content-encoding" and value != b"identity" for name, value in headers)
