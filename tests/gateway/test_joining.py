"""Pieces of a stream that wait for each other in the kernel: as one, in order, nothing missing, whatever ends them."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from gateway.joining import Joiner
from tests.gateway.harness import CHAT, HANG_GUARD_S, Replica, Running, gateway, tokens, until
from tests.gateway.straight_support import request
from tests.gateway.test_resume import ALL, FAULTS, ask, check_invisible, replicas

STREAM = json.dumps({**CHAT, "stream": True}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
FOR_EVER_S = 1000.0


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


FINISH = event("", "stop") + b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Hand(Replica):
    """A replica whose streams a test writes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: asyncio.StreamWriter | None = None
        self.is_left = False
        self._end = asyncio.Event()
        self.worker._completion = self._play  # type: ignore[method-assign]

    async def _play(self, *arguments: Any) -> bytes:
        *_, reader, self.writer = arguments
        self._end.clear()
        end, left = asyncio.create_task(self._end.wait()), asyncio.create_task(reader.read(1))
        await asyncio.wait({end, left}, return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            end.cancel()
            self.is_left = True
            raise ConnectionResetError
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        return b""

    def say(self, data: bytes) -> None:
        """At once: what the kernel has when this returns, it has for the gateway."""
        assert self.writer is not None
        self.writer.write(data)
        assert not self.writer.transport.get_write_buffer_size()

    def end(self) -> None:
        self._end.set()


class Pauses:
    """The gateway's pauses last until the test ends them."""

    def __init__(self, running: Running) -> None:
        assert running.app._proxy is not None
        self.joiner = running.app._proxy._relay._joiner = Joiner(FOR_EVER_S, busy_share=0.0, reads_per_s=1e-6)

    def end(self) -> None:
        joiner = self.joiner
        joiner.check_invariants()
        assert joiner._timer is not None
        joiner._timer.cancel()
        joiner._timer = None
        while joiner._paused:
            joiner._paused.popleft()[1].read_on()


class Client:
    """Reads a stream by the pieces in which it was written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> bytes:
        async with asyncio.timeout(HANG_GUARD_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def piece(self) -> bytes:
        """Empty at the end."""
        async with asyncio.timeout(HANG_GUARD_S):
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            return data


async def paused_stream(running: Running, replica: Hand) -> tuple[Client, Pauses]:
    """A stream whose first pieces `a` and `b` went on at once, and which is paused."""
    pauses = Pauses(running)
    client = Client(*await asyncio.open_connection("127.0.0.1", running.port))
    client.writer.write(request(STREAM))
    await until(lambda: replica.writer is not None)
    replica.say(HEAD + chunk(event("a")))
    await client.head()
    assert await client.piece() == event("a")
    await until(lambda: pauses.joiner.num_streams == 1)
    replica.say(chunk(event("b")))
    assert await client.piece() == event("b")
    await until(lambda: pauses.joiner.num_pauses == 1)
    return client, pauses


async def test_what_comes_in_a_pause_goes_on_as_one_piece_and_so_does_the_end():
    replica = Hand()
    async with gateway(replica) as running:
        client, pauses = await paused_stream(running, replica)
        for text in "cde":
            replica.say(chunk(event(text)))
        pauses.end()
        assert await client.piece() == event("c") + event("d") + event("e")
        await until(lambda: pauses.joiner.num_pauses == 2)
        replica.say(chunk(event("f")) + chunk(FINISH) + LAST)
        replica.end()
        pauses.end()
        assert await client.piece() == event("f") + FINISH
        assert await client.piece() == b""
        assert pauses.joiner.num_streams == 0
        first, replica.writer = replica.writer, None
        client.writer.write(request(STREAM))  # both connections serve on
        await until(lambda: replica.writer is first)
        replica.say(HEAD + chunk(event("g")) + chunk(FINISH) + LAST)
        replica.end()
        await client.head()
        assert b"".join([await client.piece(), await client.piece()]) == event("g") + FINISH
        client.writer.close()
        assert running.events("warmgate_stream_pauses_total") == 0, "the gateway's own joiner had none"


@pytest.mark.parametrize("is_cut", [True, False], ids=["reset", "closed"])
async def test_a_replica_that_dies_in_a_pause_is_an_error_behind_what_it_had_sent(is_cut):
    replica = Hand()
    async with gateway(replica) as running:
        client, pauses = await paused_stream(running, replica)
        replica.say(chunk(event("c")) + chunk(event("d")) + b"ff\r\ndata: ")
        assert replica.writer is not None
        if is_cut:
            replica.writer.transport.abort()
        else:
            replica.writer.close()
        await replica.writer.wait_closed()
        pauses.end()
        assert await client.piece() == event("c") + event("d")
        await until(lambda: pauses.joiner.num_pauses == 2)
        pauses.end()
        assert (await client.piece()).startswith(b'data: {"error"')
        assert await client.piece() == b""
        client.writer.close()


async def test_a_client_that_leaves_in_a_pause_is_noticed_in_it():
    replica = Hand()
    async with gateway(replica) as running:
        client, pauses = await paused_stream(running, replica)
        client.writer.close()
        await until(lambda: replica.is_left)
        await running.is_quiet()
        pauses.end()  # of a stream that is no more


async def test_a_request_whose_time_is_up_in_a_pause_ends_then():
    replica = Hand()
    async with gateway(replica, request_s=0.5) as running:
        client, pauses = await paused_stream(running, replica)
        assert b'"timeout"' in await client.piece()
        assert await client.piece() == b""
        client.writer.close()
        pauses.end()


async def test_a_slow_reader_and_pauses_get_along():
    """Whichever ends first, the replica is read on only behind both."""
    big = "x" * 8000
    replica = Replica()
    async with gateway(replica) as running:
        relay = running.app._proxy._relay  # type: ignore[union-attr]
        relay._joiner = Joiner(0.002, busy_share=0.0, reads_per_s=1.0)
        replica.worker.model = big
        replica.play(num_tokens=2000)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", running.port))
        client = Client(*await asyncio.open_connection(sock=connection, limit=1024))
        client.writer.write(request(STREAM))
        body = b""
        await client.head()
        while data := await client.piece():
            body += data
        assert tokens(body) == [f" t{n}" for n in range(2000)]
        assert body.endswith(b"data: [DONE]\n\n")
        client.writer.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_stream_that_breaks_between_pauses_goes_on_elsewhere(fault):
    bad, good = replicas(2)
    async with gateway(bad, good, stream_idle_s=0.3, max_sse_line_bytes=4096) as running:
        joiner = running.app._proxy._relay._joiner = Joiner(0.005, busy_share=0.0, reads_per_s=1.0)  # type: ignore[union-attr]
        undisturbed = (await ask(running)).content
        bad.play(fault=fault, after=7, token_s=0.001, times=1)
        answers = [await ask(running) for _ in range(2)]
        assert [tokens(answer.content) for answer in answers] == [ALL, ALL]
        [broken] = [answer for answer in answers if answer.content != undisturbed]
        check_invisible(broken.content, undisturbed)
        assert joiner.num_streams == 0
        joiner.check_invariants()


class Stream:
    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def read_on(self) -> None:
        self._order.append(self._name)


def read(joiner: Joiner, num_read: int, now: float) -> float:
    """So many streams begin, and one of them is read at `now`, when it is time for a look; its pause. Then they end."""
    joiner._look_at = now
    for _ in range(num_read):
        joiner.begins()
    pause_s = joiner.pause_s(now, now - 0.001)
    for _ in range(num_read):
        joiner.ends(now - 0.001)
    joiner.check_invariants()
    return pause_s


async def test_pauses_end_in_turn_by_themselves():
    joiner = Joiner(0.01, busy_share=0.0, reads_per_s=1000.0)
    now = asyncio.get_running_loop().time()
    order: list[str] = []
    assert read(joiner, 5, now + 1) == 0.005
    for number in range(3):
        joiner.add(Stream(f"{number}", order), now + 0.005 * number)
        joiner.check_invariants()
    await until(lambda: len(order) == 3)
    assert order == ["0", "1", "2"]
    assert joiner.num_pauses == 3
    joiner.check_invariants()


async def test_a_pause_is_a_streams_share_of_all_reads_and_has_a_bound():
    joiner = Joiner(0.01, busy_share=0.0, reads_per_s=1000.0)
    now = asyncio.get_running_loop().time()
    pauses = [read(joiner, num_streams, now + 1 + number) for number, num_streams in enumerate((1, 4, 10, 100))]
    assert pauses == [0.0, 0.004, 0.01, 0.01], "what is too short for a timer is none"


async def test_only_streams_that_flow_have_a_share_of_the_reads():
    joiner = Joiner(1.0, busy_share=0.0, reads_per_s=1000.0)
    start = asyncio.get_running_loop().time() + 1
    for _ in range(100):
        joiner.begins()
    assert joiner.pause_s(start, start - 0.5) == 0.1, "a stream counts from its beginning on"
    for _ in range(5):  # of the others comes nothing
        assert joiner.pause_s(start + 0.01, start - 2) == 0.1
    for _ in range(9):  # nor is one that is read often more than one
        assert joiner.pause_s(start + 0.02, start + 0.01) == 0.1
    for _ in range(20):  # nor do those count that come and go
        joiner.begins()
        joiner.ends(start + 0.03)
    assert joiner.pause_s(start + 0.06, start + 0.02) == 0.005
    joiner.ends(start)
    assert joiner.pause_s(start + 0.2, start + 0.06) == 0.0, "what is too short for a timer is none"
    joiner.check_invariants()


def test_streams_pause_while_the_thread_is_busy_and_a_while_longer(monkeypatch):
    cpu_s = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s)
    joiner = Joiner(0.01)
    now = time.monotonic() + 10
    shares = (0.0, 0.4, 0.6, 0.3, 0.6, 0.2, 0.4)
    pauses = []
    for share in shares:
        now += 0.1
        cpu_s += 0.1 * share
        pauses.append(read(joiner, 100, now) > 0)
    assert pauses == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(("join_s", "busy_share"), [(0.01, 2.0), (0.0, 0.0)], ids=["idle", "off"])
async def test_nothing_pauses_on_an_idle_gateway_or_where_it_is_off(join_s, busy_share):
    replica = Replica()
    async with gateway(replica) as running:
        joiner = running.app._proxy._relay._joiner = Joiner(join_s, busy_share, reads_per_s=1.0)  # type: ignore[union-attr]
        replica.play(num_tokens=50, token_s=0.0001)
        assert len(tokens((await running.chat(stream=True)).content)) == 50
        assert joiner.num_pauses == 0
