"""HTTP to replicas: one POST in, a response whose body is read as it arrives, every failure named by kind.

Bytes go through as received (no decompression, identity asked for), with no cookies, redirects or environment proxies,
and only the headers that an engine needs. Timeouts other than the TCP connect's are not set here: the proxy owns them,
with one guard a request (guard.py).

A kept-alive connection may have been closed by the replica at the very moment it is reused. That shows as an end
before any byte of the response, on a connection that had served before; then, and only then, the request is sent once
more on a new connection. An end on a new connection is the replica's failure. So is it where the new one can't be made:
the request had been sent, and may be what the replica died of.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from urllib.parse import quote, urlsplit

from gateway.answer_head import RawHeaders, cached_tokens_in, returned
from gateway.upstream_connection import Connection
from gateway.upstream_pool import Pool
from gateway.upstream_types import Sink, UpstreamError, UpstreamFailure, broken

__all__ = ["Sink", "Target", "Upstream", "UpstreamError", "UpstreamFailure", "UpstreamResponse", "request_headers"]

# What an engine may want to see of a client's request. Everything else stays here: hop-by-hop headers, cookies,
# forwarding headers, the client's own key, and x-warmgate-* that a client might forge.
_FORWARDED = frozenset(
    {b"content-type", b"accept", b"traceparent", b"tracestate", b"openai-organization"}
    | {b"openai-project", b"openai-beta"}
)


class Target:
    """A path on a replica: where to connect, and the first lines of every request for it."""

    __slots__ = ("head", "host", "is_tls", "origin", "port")

    def __init__(self, base_url: str, path: str) -> None:
        """`base_url` was checked by config.ReplicaSpec."""
        parts = urlsplit(base_url + path)
        assert parts.hostname is not None
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.is_tls else 80)
        self.origin = (self.host, self.port, self.is_tls)
        location = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        netloc = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        self.head = (
            b"POST " + location.encode("ascii") + b" HTTP/1.1\r\nhost: " + netloc
            + b"\r\naccept-encoding: identity\r\n"
        )  # fmt: skip


class UpstreamResponse:
    """A replica's answer from its status line on. Close it, whether it was read to its end or not."""

    __slots__ = ("_connection", "_pool", "content_type", "raw_headers", "status")

    def __init__(self, connection: Connection, pool: Pool) -> None:
        self._connection: Connection | None = connection
        self._pool = pool
        self.status = connection.status
        self.raw_headers = connection.headers
        self.content_type = self.header(b"content-type") or ""

    def header(self, name: bytes) -> str | None:
        """`name` in lower case."""
        for key, value in self.raw_headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those that go back to the client."""
        return returned(self.raw_headers)

    @property
    def cached_tokens(self) -> int | None:
        return cached_tokens_in(self.raw_headers)

    async def read_some(self) -> bytes:
        """All that has arrived, or what arrives next; empty at the end. Raises UpstreamError."""
        return await self._open.read_some()

    async def read_all(self, max_bytes: int) -> bytes:
        """The whole body. Raises UpstreamError when it is cut short or larger than `max_bytes`."""
        connection = self._open
        if (whole := connection.take_whole()) is not None:
            _check_size(len(whole), max_bytes)
            return whole
        parts: list[bytes] = []
        size = 0
        while part := await connection.read_some():
            parts.append(part)
            size += len(part)
            _check_size(size, max_bytes)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pipe(self, sink: Sink) -> None:
        """Hand the rest of the body to `sink` as it arrives, from the connection's callback (Connection.pipe)."""
        self._open.pipe(sink)

    def unpipe(self) -> None:
        """The sink gets nothing more; what comes is kept for `read_some`."""
        self._open.unpipe()

    def pause(self) -> None:
        """Let nothing more arrive until `resume`: the client reads more slowly than the replica writes."""
        self._open.pause()

    def resume(self) -> None:
        self._open.resume()

    @property
    def at_end(self) -> bool:
        return self._connection is None or self._connection.at_end

    def close(self) -> None:
        """End the exchange. A body not read to its end closes the connection, which tells the replica to stop."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.done():
            self._pool.put_back(connection)

    @property
    def _open(self) -> Connection:
        assert self._connection is not None, "a response is not used after close"
        return self._connection


class Upstream:
    """The data plane's client. Use inside a running loop; `await close()` at the end."""

    def __init__(self, connect_s: float, max_connections_per_replica: int) -> None:
        self._connect_s = connect_s
        self._max_connections = max_connections_per_replica
        self._pools: dict[tuple[str, int, bool], Pool] = {}
        self._context: ssl.SSLContext | None = None

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)  # let the transports' last callbacks run

    async def post(
        self, target: Target, headers: bytes, body: bytes, is_again: bool = False,
        on_again: Callable[[], None] | None = None,
    ) -> UpstreamResponse:  # fmt: skip
        """Send a request; returns when the status line and headers are in. Raises UpstreamError.

        `headers` are whole header lines, as request_headers makes them. `is_again`: it was sent over a connection that
        had served before and broke, so it gets a new one. `on_again` is called whenever it is sent on such a new one.
        """
        pool = self._pools.get(target.origin)
        if pool is None:
            pool = await self._make_pool(target)
        head = _head(target, headers, body)
        if not is_again:
            connection = pool.reusable() or await pool.take()
            was_used = connection.num_served > 0
            started = time.monotonic()
            try:
                return await _exchange(pool, connection, head, body)
            except UpstreamError:
                if not was_used or not self.may_repeat(connection, started):
                    raise
        try:
            connection = await pool.fresh()
        except UpstreamError as error:
            raise broken(f"the replica closed the connection before answering, and now: {error}") from error
        if on_again is not None:
            on_again()
        return await _exchange(pool, connection, head, body)

    def try_post(self, target: Target, headers: bytes, body: bytes, on_news: Callable[[], None]) -> Connection | None:
        """The same without waiting, over a connection that is there: None where none is idle. `on_news` is called back
        as by Connection.watch. `response_of` or `done` take the connection from there; close it where it broke."""
        pool = self._pools.get(target.origin)
        connection = pool.reusable() if pool is not None else None
        if connection is not None:
            connection.watch(on_news)
            connection.send(_head(target, headers, body), body)
        return connection

    def may_repeat(self, connection: Connection, started: float) -> bool:
        """Whether a request sent at `started` over a used connection that broke may be sent once more: the replica had
        closed the connection before the request reached it."""
        return not connection.answered and time.monotonic() - started < self._connect_s

    def response_of(self, target: Target, connection: Connection) -> UpstreamResponse:
        """The answer on a connection of try_post, of which at least the head has come."""
        return UpstreamResponse(connection, self._pools[target.origin])

    def done(self, target: Target, connection: Connection) -> None:
        """The exchange on a connection of try_post has ended."""
        if connection.done():
            self._pools[target.origin].put_back(connection)

    async def _make_pool(self, target: Target) -> Pool:
        context = None
        if target.is_tls:
            if self._context is None:
                self._context = await asyncio.to_thread(ssl.create_default_context)
            context = self._context
        pool = Pool(target.host, target.port, context, self._max_connections, self._connect_s)
        return self._pools.setdefault(target.origin, pool)

    def check_invariants(self) -> None:
        for pool in self._pools.values():
            pool.check_invariants()


def _head(target: Target, headers: bytes, body: bytes) -> bytes:
    return b"%b%bcontent-length: %d\r\n\r\n" % (target.head, headers, len(body))


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise UpstreamError(UpstreamFailure.BROKEN, f"the replica's answer is larger than {max_bytes} bytes")


async def _exchange(pool: Pool, connection: Connection, head: bytes, body: bytes) -> UpstreamResponse:
    try:
        connection.send(head, body)
        await connection.head()
    except BaseException:
        connection.close()
        raise
    return UpstreamResponse(connection, pool)


def request_headers(client_headers: RawHeaders, request_id: str, api_key: str | None) -> bytes:
    """What goes to a replica, as header lines: a short list of the client's headers, and ours.

    The client's values come from a parser that refuses line ends in them.
    """
    return with_forwarded(forwarded(client_headers), request_id, api_key)


def forwarded(client_headers: RawHeaders) -> bytes:
    """The lines of a client's headers that replicas see."""
    return b"".join(b"%b: %b\r\n" % (name, value) for name, value in client_headers if name in _FORWARDED)


def with_forwarded(lines: bytes, request_id: str, api_key: str | None) -> bytes:
    """request_headers, of which `forwarded` was made before."""
    key = b"authorization: Bearer %b\r\n" % api_key.encode("latin-1") if api_key is not None else b""
    return b"x-request-id: %b\r\n%b%b" % (request_id.encode("ascii"), lines, key)
