"""One HTTP exchange over plain ASGI: reading the body with limits, answering, noticing that the client is gone.

The commit point is `started`: before it an error becomes a response with its status, after it only an event in the
stream. A client that has gone raises ClientGone, which is nobody's failure.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from engine_worker.contract.errors import ApiError, check_json_type

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
Result = TypeVar("Result")

MAX_BODY_BYTES = 16 * 1024 * 1024
BODY_IDLE_S = 30.0  # a client may pause this long in the middle of its body
LINGER_S = 2.0  # how long a body that nobody wants is read on before its connection is closed
SEND_STALL_S = 60.0  # a client may leave a full buffer unread this long

_SMALL_BODY_BYTES = 64 * 1024

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class DirectWriter(Protocol):
    """The scope's extension `warmgate.write` (http_protocol.py): parts of an answer's body without a task's turn."""

    @property
    def is_open(self) -> bool:
        """Whether the answer has begun in chunks, has not ended, and the client reads."""
        ...

    def write(self, data: bytes) -> None: ...


class ClientGone(Exception):
    """The client has closed the connection or stopped reading."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started = False
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._extensions: dict[str, Any] = scope.get("extensions") or {}
        self._direct: DirectWriter | None = self._extensions.get("warmgate.write")
        self._receive = receive
        self._send = send
        self._body_read = False
        given = self.header(b"x-request-id")
        self.request_id = given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self._headers if key == name), None)

    async def body(self, limit: int = MAX_BODY_BYTES) -> bytes:
        """The whole body. Raises ApiError 400, 408, 413 or 415, or ClientGone."""
        self._check_headers(limit)
        chunks: list[bytes] = []
        num_bytes = 0
        while not self._body_read:
            try:
                async with asyncio.timeout(BODY_IDLE_S):
                    message = await self._receive()
            except TimeoutError as error:
                raise ApiError(408, f"The request body stopped arriving for {BODY_IDLE_S:.0f} s.") from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            num_bytes += len(chunks[-1])
            if num_bytes > limit:
                raise _too_large(limit)
            self._body_read = not message.get("more_body", False)
        return b"".join(chunks)

    def _check_headers(self, limit: int) -> None:
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        if (self.header(b"content-encoding") or b"identity").lower() != b"identity":
            raise ApiError(415, "Compressed request bodies are not read; send the JSON as it is.")
        check_json_type(self.header(b"content-type"))

    async def while_connected(self, work: Awaitable[Result]) -> Result:
        """Await `work`, or cancel it and raise ClientGone as soon as the client has gone. The body must be read."""
        assert self._body_read
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        all_headers = [*headers, (b"x-request-id", self.request_id)]
        await self._write({"type": "http.response.start", "status": status, "headers": all_headers})

    async def write(self, data: bytes) -> None:
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def can_write_now(self) -> bool:
        """Whether `write_now` may be called: the answer has begun, and the client reads what is written."""
        return self._direct is not None and self._direct.is_open

    def write_now(self, data: bytes) -> None:
        """`write`, without waiting."""
        assert self._direct is not None
        self._direct.write(data)

    async def end(self, data: bytes = b"") -> None:
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(
        self,
        status: int,
        body: bytes,
        headers: Headers = (),
        content_type: bytes = b"application/json",
    ) -> None:
        await self.start(
            status, [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
        )
        await self.end(body)

    async def fail(self, error: ApiError, headers: Headers = ()) -> None:
        """Answer with an error. Only before the start."""
        more = list(headers)
        if error.retry_after_s is not None:
            more.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
        if not self._leaves_much_unread:
            await self.respond(error.status, error.body(), more)
            return
        body = error.body()
        length = str(len(body)).encode()
        more += [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        await self.start(error.status, more)
        await self.write(body)
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._discard_body()
        await self.end()

    @property
    def _leaves_much_unread(self) -> bool:
        """Whether so much of the body is still to come that the connection is better closed than read on."""
        if self._body_read or self.method != "POST":
            return False
        length = self.header(b"content-length")
        return length is None or not length.isdigit() or int(length[:20]) > _SMALL_BODY_BYTES

    async def _discard_body(self) -> None:
        """Read on a while: closing with unread input resets the connection, and the client might lose the answer."""
        while not self._body_read:
            message = await self._receive()
            self._body_read = message["type"] == "http.disconnect" or not message.get("more_body", False)

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_STALL_S):
                await self._send(message)
        except TimeoutError as error:
            self._abort()
            raise ClientGone from error

    def _abort(self) -> None:
        """Drop the connection of a client that doesn't read: closing it politely would wait for the buffer to drain."""
        abort = self._extensions.get("warmgate.abort")
        if abort is not None:
            abort["call"]()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
