"""A TCP proxy that harms what passes through it: slow, narrow, cut into slices, cut short, reset, or silent.

    async with toxic("127.0.0.1", port) as link:
        link.reset_after = 500      # and connect to link.port

Harm is done to what comes back from the server (and `latency_s` to both directions), by what is set at that moment.
Everything that passes is counted, so tests can wait for a state instead of sleeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_READ_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class Toxic:
    """What is done to a connection's answers.

    latency_s       each read is held for so long before it goes on, in either direction
    bytes_per_s     how wide the link is; 0: as wide as it comes
    slice_bytes     answers go on in pieces of so many bytes, each its own segment; 0: as they come
    truncate_after  after so many bytes the connection is closed properly (FIN)
    reset_after     after so many bytes it is reset (RST)
    stall_after     after so many bytes nothing more goes on, and the connection stays
    refuse          new connections are reset at once
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    truncate_after: int | None = None
    reset_after: int | None = None
    stall_after: int | None = None
    refuse: bool = False
    port: int = 0
    num_connections: int = 0
    num_bytes: int = 0
    _healed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def heal(self) -> None:
        """Harm nothing more. Connections that stood still are reset."""
        self.latency_s = self.bytes_per_s = 0.0
        self.slice_bytes = 0
        self.truncate_after = self.reset_after = self.stall_after = None
        self.refuse = False
        self._healed.set()
        self._healed = asyncio.Event()

    async def pass_on(self, host: str, port: int, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        self.num_connections += 1
        if self.refuse:
            _reset(answer)
            return
        try:
            server, request = await asyncio.open_connection(host, port)
        except OSError:
            _reset(answer)
            return
        up = asyncio.create_task(self._upward(client, request))
        down = asyncio.create_task(self._downward(server, answer))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            request.close()
            answer.close()

    async def _upward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                await asyncio.sleep(self.latency_s)
                writer.write(data)
                await writer.drain()

    async def _downward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        try:
            while data := await reader.read(_READ_BYTES):
                await asyncio.sleep(self.latency_s)
                size = self.slice_bytes or len(data)
                for start in range(0, len(data), size):
                    piece = data[start : start + size]
                    ends = [end for end in (self.truncate_after, self.reset_after, self.stall_after) if end is not None]
                    room = min(ends, default=passed + len(piece)) - passed
                    writer.write(piece[: max(room, 0)])
                    await writer.drain()
                    self.num_bytes += min(len(piece), max(room, 0))
                    passed += len(piece)
                    if room < len(piece) or (ends and room == len(piece)):
                        await self._end(passed, writer)
                        return
                    await asyncio.sleep(len(piece) / self.bytes_per_s if self.bytes_per_s else 0)
        except ConnectionError:
            _reset(writer)  # as it came

    async def _end(self, passed: int, writer: asyncio.StreamWriter) -> None:
        if self.stall_after is not None and passed >= self.stall_after:
            await self._healed.wait()
            _reset(writer)
        if self.reset_after is not None and passed >= self.reset_after:
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    own_socket = writer.get_extra_info("socket")
    own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Link:
    """A toxic port in front of `host`:`port` that can be closed, as the port of a dead process is, and opened again."""

    def __init__(self, host: str, port: int) -> None:
        self.toxic = Toxic()
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen, on the port of before where there was one. Raises OSError."""
        if self._server is not None:
            return
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", self.toxic.port)
        self.toxic.port = self._server.sockets[0].getsockname()[1]

    def shut(self) -> None:
        """Refuse connections from now on; those there are stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def close(self) -> None:
        """End everything on it."""
        self.shut()
        tasks = list(self.toxic._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.toxic._tasks.add(task)
        try:
            await self.toxic.pass_on(self._host, self._port, reader, writer)
        finally:
            self.toxic._tasks.discard(task)


@contextlib.asynccontextmanager
async def toxic(host: str, port: int) -> AsyncIterator[Toxic]:
    """A link to `host`:`port` that harms nothing yet; everything on it ends with the context."""
    link = Link(host, port)
    await link.open()
    try:
        yield link.toxic
    finally:
        await link.close()
