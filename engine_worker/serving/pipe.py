"""The socket pair between the API process and the engine process: messages in frames, one stream each way.

Theory. A step ends with one message, and what its way costs is paid in every step by both processes, which may share
one core. So there is nothing between the two but the kernel: the engine's thread writes the message itself, and the
API process's event loop is woken once and reads it. A frame is the payload's length as four bytes, little-endian, and
the payload.

The engine waits when the other side reads so slowly that the kernel's buffer is full; the API process never waits: its
transport keeps what can't be sent yet. So neither can wait for the other.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import cast

from engine_worker.serving.messages import (
    FromEngine,
    Shutdown,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20  # asked of the kernel, a direction: some hundred steps' messages


def framed(message: ToEngine | FromEngine) -> bytes:
    """The message as it goes over the socket."""
    payload = encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Finds the payloads in a stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that this piece completes, in order."""
        if self._rest:
            self._rest += data
            data = cast(bytes, self._rest)  # sliced and measured alike
        payloads: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            stop = begin + _LENGTH.unpack_from(data, at)[0]
            if stop > end:
                break
            payloads.append(bytes(data[begin:stop]))
            at = stop
        if data is not self._rest:
            self._rest += data[at:]
        elif at:
            del self._rest[:at]
        return payloads


class EngineSide:
    """The engine process's end, by the descriptor that it was started with. `receive` from one thread only."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._sending = threading.Lock()
        self._reader = FrameReader()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, message: FromEngine) -> None:
        """From any thread. Waits while the buffer is full."""
        data = framed(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """All waiting messages; with none, wait up to `timeout_ms` for one. Shutdown at the stream's end."""
        messages: list[ToEngine] = []
        while self._poll.poll(0 if messages else timeout_ms):
            data = self._socket.recv(_READ_BYTES)
            if not data:
                return [*messages, Shutdown()]
            messages += map(decode_to_engine, self._reader.feed(data))
            if len(data) < _READ_BYTES:
                break
        return messages

    def close(self) -> None:
        """What was sent still arrives."""
        self._socket.close()


class APISide(asyncio.Protocol):
    """The API process's end: `take` gets each message as it comes.

    `ended` is done when the stream is over. It carries the exception where a message could not be read or `take`
    raised, which ends the stream, too.
    """

    def __init__(self, take: Callable[[FromEngine], None]) -> None:
        self._take = take
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, take: Callable[[FromEngine], None]) -> tuple[APISide, socket.socket]:
        """This end, and the socket to be inherited by the engine process and closed here after that."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        _, side = await asyncio.get_running_loop().create_unix_connection(lambda: cls(take), sock=ours)
        return side, theirs

    def send(self, message: ToEngine) -> None:
        """Never waits."""
        if self._transport is not None:
            self._transport.write(framed(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._take(decode_from_engine(payload))
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.ended.done():
            self.ended.set_result(None)
