"""HTTP to replicas: one POST in, a response whose body is read as it arrives, every failure named by kind.

The client is aiohttp's without its conveniences: bytes go through as received (no decompression, identity asked for),
no cookies, no redirects, no environment proxies, and only the headers that an engine needs. Timeouts other than the
TCP connect's are not set here: the proxy owns them, with one timer a request (guard.py).

A kept-alive connection may have been closed by the replica at the very moment it is reused. That shows as a reset
before any byte of the response, on a connection that had served before; then, and only then, the request is sent once
more on a new connection. A reset on a new connection is the replica's failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import aiohttp
from aiohttp import ClientTimeout, DummyCookieJar, TCPConnector
from multidict import CIMultiDict
from yarl import URL

RawHeaders = Iterable[tuple[bytes, bytes]]

# What an engine may want to see of a client's request. Everything else stays here: hop-by-hop headers, cookies,
# forwarding headers, and x-warmgate-* that a client might forge.
_FORWARDED = frozenset(
    {b"content-type", b"authorization", b"accept", b"traceparent", b"tracestate", b"openai-organization"}
    | {b"openai-project", b"openai-beta"}
)
_NOT_RETURNED = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"content-length", b"date", b"server", b"set-cookie", b"x-request-id", b"alt-svc"}
)
# Under the 5 seconds after which uvicorn, and so most engines, close an idle connection.
_KEEP_ALIVE_S = 4.0
CACHED_TOKENS_HEADER = "x-warmgate-cached-tokens"


class UpstreamFailure(StrEnum):
    """CONNECT: nothing was sent. BROKEN: the connection ended before the response did. TIMEOUT: no answer in time."""

    CONNECT = "connect"
    BROKEN = "broken"
    TIMEOUT = "timeout"


class UpstreamError(Exception):
    def __init__(self, kind: UpstreamFailure, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class UpstreamResponse:
    """A replica's answer from its status line on. Close it, or read it to its end, exactly once."""

    __slots__ = ("_content", "_response", "content_type", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self.status = response.status
        self.content_type = response.headers.get("content-type", "")

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that go back to the client: lower case, none hop-by-hop, none of the gateway's own."""
        kept = []
        for name, value in self._response.raw_headers:
            name = name.lower()
            if name not in _NOT_RETURNED and not name.startswith(b"x-warmgate-"):
                kept.append((name, value))
        return kept

    @property
    def cached_tokens(self) -> int | None:
        value = self._response.headers.get(CACHED_TOKENS_HEADER)
        return int(value) if value is not None and value.isascii() and value.isdigit() else None

    async def read_some(self) -> bytes:
        """All that has arrived, or what arrives next; empty at the end. Raises UpstreamError."""
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(UpstreamFailure.BROKEN, f"the replica broke off its answer ({_why(error)})") from error

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body. Raises UpstreamError when it is cut short or larger than `max_bytes`."""
        parts: list[bytes] = []
        size = 0
        while part := await self.read_some():
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise UpstreamError(UpstreamFailure.BROKEN, f"the replica's answer is larger than {max_bytes} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def at_end(self) -> bool:
        return self._content.at_eof()

    def close(self) -> None:
        """End the exchange. A body not read to its end closes the connection, which tells the replica to stop."""
        self._response.close()


# Whether the connection of the request in this context is new: set by the connector, read when the request fails.
_is_new_connection: ContextVar[bool] = ContextVar("is_new_connection", default=False)


class _Connector(TCPConnector):
    """Notes when a request's connection had to be made."""

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        _is_new_connection.set(True)
        return await super()._create_connection(*args, **kwargs)


class Upstream:
    """The data plane's client. Use inside a running loop; `await close()` at the end."""

    def __init__(self, connect_s: float, max_connections_per_replica: int) -> None:
        self._stale_window_s = connect_s
        self._session = _session(
            _Connector(limit=0, limit_per_host=max_connections_per_replica, keepalive_timeout=_KEEP_ALIVE_S), connect_s
        )
        self._fresh_session = _session(TCPConnector(limit=0, force_close=True), connect_s)

    async def close(self) -> None:
        await self._session.close()
        await self._fresh_session.close()

    async def post(self, url: URL, headers: CIMultiDict[str], body: bytes) -> UpstreamResponse:
        """Send a request; returns when the status line and headers are in. Raises UpstreamError."""
        started = time.monotonic()
        _is_new_connection.set(False)
        try:
            return await self._send(self._session, url, headers, body)
        except UpstreamError as error:
            is_stale = (
                error.kind is UpstreamFailure.BROKEN
                and not _is_new_connection.get()
                and time.monotonic() - started < self._stale_window_s
            )
            if not is_stale:
                raise
        return await self._send(self._fresh_session, url, headers, body)

    async def _send(
        self, session: aiohttp.ClientSession, url: URL, headers: CIMultiDict[str], body: bytes
    ) -> UpstreamResponse:
        try:
            return UpstreamResponse(await session.post(url, data=body, headers=headers, allow_redirects=False))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(UpstreamFailure.CONNECT, f"no connection to the replica ({_why(error)})") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            message = f"the replica closed the connection before answering ({_why(error)})"
            raise UpstreamError(UpstreamFailure.BROKEN, message) from error


def request_headers(client_headers: RawHeaders, request_id: str, api_key: str | None) -> CIMultiDict[str]:
    """What goes to a replica: a short list of the client's headers, and ours."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in client_headers:
        if name in _FORWARDED:
            headers.add(name.decode("ascii"), value.decode("latin-1"))
    headers["Accept-Encoding"] = "identity"
    headers["X-Request-Id"] = request_id
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _session(connector: TCPConnector, connect_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=ClientTimeout(total=None, connect=None, sock_connect=connect_s, sock_read=None, ceil_threshold=3600),
        cookie_jar=DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        read_bufsize=256 * 1024,
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
    )


def _why(error: BaseException) -> str:
    """The system's own word for it where there is one; aiohttp's and asyncio's texts repeat the address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(error) or type(error).__name__
