"""A request's head as the straight way reads it (straight.py): once, for all that the gateway asks of it."""

from __future__ import annotations

from gateway.answer import given_id, patience_s
from gateway.openai.fields import Endpoint
from gateway.tenancy.service import Caller, given_key
from gateway.upstream import forwarded

Headers = list[tuple[bytes, bytes]]

_CHAT: tuple[Endpoint, str] = ("chat", "/v1/chat/completions")
_COMPLETIONS: tuple[Endpoint, str] = ("completions", "/v1/completions")
_URLS = {
    b"/v1/chat/completions": _CHAT,
    b"/chat/completions": _CHAT,
    b"/v1/completions": _COMPLETIONS,
    b"/completions": _COMPLETIONS,
}
# What only the general way knows to handle, be it to refuse it.
_UNUSUAL = (b"transfer-encoding", b"content-encoding", b"expect", b"origin", b"upgrade", b"http2-settings")


class Head:
    """The head of a POST over HTTP/1.1 in which nothing is unusual.

    endpoint, path    the kind of request, and the replica's path for it
    length            of the body, in bytes
    given_id, caller  the client's own id, and the key as sent
    patience_s        how long it waits for a first byte, if it says so
    forwarded         lines for the replica
    """

    __slots__ = (
        "caller", "endpoint", "forwarded", "given_id", "headers", "keep_alive", "length", "path", "patience_s", "url",
    )  # fmt: skip

    def __init__(self, url: bytes, headers: Headers, length: int, keep_alive: bool) -> None:
        self.url = url
        self.endpoint, self.path = _URLS[url]
        self.headers = headers
        self.length = length
        self.keep_alive = keep_alive
        self.given_id = given_id(headers)
        self.caller = Caller(given_key(headers))
        self.patience_s = patience_s(headers)
        self.forwarded = forwarded(headers)


def plain_head(url: bytes, headers: Headers, keep_alive: bool, max_bytes: int) -> Head | None:
    """The head of a POST to `url`; None where the straight way doesn't take it, as for bodies above `max_bytes`."""
    if url not in _URLS:
        return None
    length = 0
    for name, value in headers:
        if name == b"content-length":
            if length or len(value) > 9 or not value.isdigit():
                return None
            length = int(value)
        elif name in _UNUSUAL or (name == b"content-type" and b"json" not in value.lower()):
            return None
    return Head(url, headers, length, keep_alive) if 0 < length <= max_bytes else None
