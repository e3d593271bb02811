"""The client's side of an exchange: reading its request, answering it, noticing that it left. Plain ASGI."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, ClassVar

from engine_worker.contract.errors import ApiError, check_json_type
from gateway.guard import Guard, Interrupt

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_ids = random.Random()  # seeded by the system; ids need to be unique, not secret
os.register_at_fork(after_in_child=_ids.seed)
# Python's clients and node's.
_PATIENCE = (b"x-stainless-read-timeout", b"x-stainless-timeout")
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client left, or reads so slowly that it counts as gone."""


def request_id(scope: Scope) -> str:
    """The client's own id if it can stand in a header and a log, else a new one."""
    return given_id(scope["headers"]) or new_id()


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own id; empty where it gave none, or none that can stand in a header and a log."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"").decode("latin-1")
    return given if _SANE_ID.fullmatch(given) else ""


def new_id() -> str:
    return f"req-{_ids.getrandbits(96):024x}"


def patience_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """How long the client says that it waits for the first byte of an answer; None where it doesn't say."""
    for name, value in headers:
        if name in _PATIENCE:
            try:
                seconds = float(value)
            except ValueError:
                continue
            if 0 < seconds < math.inf:
                return seconds
    return None


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The request's whole body, which must be JSON. Raises ApiError 413 and 415, and ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if value.isdigit() and int(value[:20]) > max_bytes:
                raise _too_large(max_bytes)
        elif name == b"content-type":
            if value != b"application/json":
                check_json_type(value)
        elif (name == b"content-encoding" and value.lower() != b"identity") or (
            name == b"transfer-encoding" and value.lower() != b"chunked"
        ):
            raise ApiError(415, "Compressed request bodies are not read; send the JSON as it is.")
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body = message.get("body", b"")
        return bytes(sized(body, max_bytes))
    parts: list[bytes] = []
    size = 0
    while message["type"] == "http.request":
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    raise ClientGone


def sized(body: bytes, max_bytes: int) -> bytes:
    """`body`, which may be so large. Raises ApiError 413."""
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the {max_bytes} bytes that this gateway accepts.")


class Watch:
    """From `start` to `stop`, a client that leaves interrupts its request. Start it when the body has been read."""

    __slots__ = ("_connection", "_guard", "_task")

    def __init__(self, scope: Scope, guard: Guard) -> None:
        self._connection = scope.get("extensions", {}).get("warmgate.connection")
        self._guard = guard
        self._task: asyncio.Task[None] | None = None

    def start(self, receive: Receive) -> None:
        if self._connection is not None:
            self._connection.on_gone = self._gone
        else:
            self._task = asyncio.get_running_loop().create_task(self._wait(receive))

    def stop(self) -> None:
        if self._connection is not None:
            if self._connection.on_gone == self._gone:  # else the connection's next request has set its own
                self._connection.on_gone = None
        elif self._task is not None:
            self._task.cancel()

    def _gone(self) -> None:
        self._guard.interrupt(Interrupt.CLIENT_GONE)

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone()


class Answer:
    """One response. Knows whether its status line is out, which decides what an error can still look like.

    Behind our own server it writes to the client's socket itself (http_protocol.Cycle), unless something stands in
    between that wants to see ASGI's messages.
    """

    __slots__ = ("_cycle", "_scope", "_send", "completed", "headers", "started", "status")
    is_verbatim: ClassVar[bool] = True  # what is written reaches the client as it is

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        connection = scope.get("extensions", {}).get("warmgate.connection")
        cycle = connection.cycle if connection is not None else None
        self._cycle = cycle if cycle is not None and getattr(send, "__self__", None) is cycle else None
        self.started = False
        self.completed = False
        self.status = 0
        self.headers: Headers = []

    async def start(self, status: int, headers: Headers) -> None:
        """The status line and headers; `self.headers` (ids and routing facts) come with every response."""
        assert not self.started
        self.started = True
        self.status = status
        if self._cycle is not None:
            await self._cycle.drain()
            self._cycle.begin(status, headers + self.headers)
            return
        await self._send({"type": "http.response.start", "status": status, "headers": headers + self.headers})

    async def write(self, data: bytes) -> None:
        if self._cycle is not None:
            await self._cycle.drain()
            self._cycle.push(data)
            return
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        assert not self.completed
        self.completed = True
        if self._cycle is not None:
            await self._cycle.drain()
            self._cycle.finish(data)
            return
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        cycle = self._cycle
        if cycle is None or cycle.is_paused:
            await self.start(status, headers)
            await self.end(body)
            return
        assert not self.started  # nothing to wait for: the usual case, without the coroutines of the one above
        self.started = self.completed = True
        self.status = status
        cycle.begin(status, headers + self.headers)
        cycle.finish(body)

    async def error(self, error: ApiError) -> None:
        """A response of its own before the status line, an event that ends the stream after it."""
        if self.started:
            await self.end(b"data: " + error.body() + b"\n\n")
            return
        headers: Headers = [_JSON]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        if error.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
        if error.status in (408, 413, 415):
            headers.append((b"connection", b"close"))
        await self.whole(error.status, headers, error.body())

    @property
    def connection(self) -> Any:
        """The http_protocol.Connection to `push` to; None where only `write` will do."""
        return self._scope["extensions"]["warmgate.connection"] if self._cycle is not None else None

    @property
    def is_gone(self) -> bool:
        """Whether its client is known to have left."""
        return self._cycle is not None and self._cycle.disconnected

    @property
    def push(self) -> Callable[[bytes], None]:
        """`write` from a callback: what the client doesn't read yet is buffered, and `connection.on_paused` says so."""
        assert self._cycle is not None
        push: Callable[[bytes], None] = self._cycle.push
        return push

    def abandon(self) -> None:
        """The client doesn't read: drop the connection with what is buffered, where the server lets us."""
        self.completed = True
        if self._cycle is not None:
            self._cycle.disconnected = True  # before its socket says so: nobody waits for an answer any more
        connection = self._scope.get("extensions", {}).get("warmgate.connection")
        if connection is not None:
            connection.abort()
