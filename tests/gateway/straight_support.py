"""A client's connection of its own, and which way its requests went."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from gateway.begun import Begun
from tests.gateway.harness import CHAT, HANG_GUARD_S, Replica, Running, gateway

BODY = json.dumps(CHAT).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def request(body: bytes = BODY, extra: bytes = b"") -> bytes:
    return HEAD + extra + b"content-length: %d\r\n\r\n" % len(body) + body


class Ways:
    """Which requests went on by the general way: from their beginning, or begun on the straight one."""

    def __init__(self, running: Running) -> None:
        proxy = running.app._proxy
        assert proxy is not None
        self.num_general = 0
        self.begun: list[Begun] = []
        from_start, take_over = proxy._from_start, proxy.take_over

        def count_start(*args):
            self.num_general += 1
            return from_start(*args)

        def count_begun(scope, receive, send, begun):
            self.begun.append(begun)
            return take_over(scope, receive, send, begun)

        proxy._from_start, proxy.take_over = count_start, count_begun  # type: ignore[method-assign]

    @property
    def were_straight(self) -> bool:
        return not self.num_general and not self.begun


class Line:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer that has a length."""
        async with asyncio.timeout(HANG_GUARD_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(data)
        return await self.answer()


@contextlib.asynccontextmanager
async def line(running: Running) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def warmed(*replicas: Replica, **settings) -> AsyncIterator[tuple[Running, Ways]]:
    """A gateway that has an idle connection to each of its replicas."""
    async with gateway(*replicas, **settings) as running:
        for _ in replicas:
            assert (await running.chat()).status_code == 200
        yield running, Ways(running)
