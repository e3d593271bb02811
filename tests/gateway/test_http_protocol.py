"""The client's side of HTTP, on raw sockets: what is odd is answered or refused, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from gateway.http_protocol import GatewayProtocol
from tests.gateway.harness import CHAT, HANG_GUARD_S, Replica, Running, gateway, until

BODY = json.dumps(CHAT).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)


async def talk(running: Running, *parts: bytes) -> bytes:
    """Send parts, and read until the gateway closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    finally:
        writer.close()


async def test_pipelined_requests_are_answered_in_order():
    """Row 32."""
    replica = Replica()
    async with gateway(replica) as running:
        one = HEAD + b"x-request-id: one\r\n" + LENGTH + b"\r\n" + BODY
        two = HEAD + b"x-request-id: two\r\nconnection: close\r\n" + LENGTH + b"\r\n" + BODY
        answer = await talk(running, one + two)
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.index(b"x-request-id: one") < answer.index(b"x-request-id: two")


async def test_requests_that_wait_for_their_turn_are_bounded():
    """However many a client sends ahead, only what one read brings is kept."""
    async with gateway(Replica()) as running:
        count = 400
        one = b"GET /ready HTTP/1.1\r\nhost: x\r\nx-pad: " + b"x" * 8000 + b"\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        async with asyncio.timeout(HANG_GUARD_S):
            sending = asyncio.create_task(_send(writer, one * count))
            most = 0
            for _ in range(count):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                await reader.readuntil(b'{"ready":true}')
                waiting = [len(c.pipeline) for c in running._server.server_state.connections]  # type: ignore[union-attr]
                most = max(most, *waiting)
            await sending
        assert most <= 256 * 1024 // 8000 + 1
        writer.close()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def test_expect_100_continue_is_answered_before_the_body_comes():
    """Row 33."""
    async with gateway(Replica()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HEAD + b"expect: 100-continue\r\n" + LENGTH + b"\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert b" 200 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: -1\r\n",
        b"content-length: 0x10\r\n",
        b"transfer-encoding: chunked\r\nbad header\r\n",
    ],
)
async def test_ambiguous_framing_is_refused_and_the_connection_closed(head):
    """Row 34."""
    replica = Replica()
    async with gateway(replica) as running:
        answer = await talk(running, HEAD + head + b"\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"
        assert replica.log.num_started == 0


@pytest.mark.parametrize("num_good", [1, 3])
@pytest.mark.parametrize("bad", [b"\x00garbage\r\n\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"])
async def test_what_is_not_http_takes_no_answer_from_the_requests_before_it(num_good, bad):
    replica = Replica()
    async with gateway(replica) as running:
        assert (await running.chat()).status_code == 200
        answers = await talk(running, (HEAD + LENGTH + b"\r\n" + BODY) * num_good + bad)
        statuses = [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [200] * num_good + [400]
        assert replica.log.num_started == 1 + num_good
        assert answers.endswith(b"}")


async def test_a_body_in_chunks_is_read_and_forwarded_whole():
    replica = Replica()
    async with gateway(replica) as running:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:30], BODY[30:]))
        answer = await talk(
            running, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", chunks + b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert replica.log.last_body.encode() == BODY


async def test_slow_headers_are_timed_out(monkeypatch):
    """Row 30."""
    monkeypatch.setattr(GatewayProtocol, "header_s", 0.05)
    async with gateway(Replica()) as running:
        answer = await talk(running, HEAD)
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_head_without_a_body_goes_out():
    async with gateway(Replica()) as running:
        answer = await talk(running, b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        answer = await talk(running, b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 204 ")


async def test_a_client_that_half_closes_counts_as_gone():
    """Row 26: it can't be told from one that left, and no client of this API does it."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="stall")
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HEAD + LENGTH + b"\r\n" + BODY)
        await until(lambda: replica.log.num_in_flight == 1)
        writer.write_eof()
        await until(lambda: replica.log.num_aborted == 1)
        assert await reader.read() == b""
        writer.close()


async def test_a_disconnect_is_seen_under_another_server_too():
    """Without our protocol's hook the application waits for `http.disconnect` as ASGI has it."""
    replica = Replica()
    async with gateway(replica, server_http="httptools") as running:
        assert (await running.chat()).status_code == 200
        replica.play(token_s=0.01, num_tokens=10_000)
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HEAD + LENGTH + b"\r\n" + BODY)
        await until(lambda: replica.log.num_in_flight == 1)
        writer.close()
        await until(lambda: replica.log.num_aborted == 1)


async def test_what_stands_behind_a_chunked_body_is_no_header():
    async with gateway(Replica()) as running:
        head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        chunk = b"%x\r\n%b\r\n0\r\nx-request-id: trailer\r\n\r\n" % (len(BODY), BODY)
        answer = await talk(running, head + chunk)
        assert b" 200 " in answer
        assert b"trailer" not in answer


async def test_the_rest_of_a_refused_body_does_not_keep_its_connection():
    """A client that is refused early and goes on sending a little of its body now and then is idle."""
    async with gateway(Replica()) as running:
        running._server.config.timeout_keep_alive = 0.3
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        async with asyncio.timeout(HANG_GUARD_S):
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.read(1000)
        writer.close()


async def test_an_answer_that_is_read_slowly_but_steadily_is_not_cut(monkeypatch):
    """A part of it is read before each look whether the connection is idle; the whole takes several of these."""
    looks: asyncio.Queue[None] = asyncio.Queue()
    look = GatewayProtocol._look_if_idle

    def noted(self: GatewayProtocol) -> None:
        look(self)
        looks.put_nowait(None)

    monkeypatch.setattr(GatewayProtocol, "_look_if_idle", noted)
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(num_tokens=400_000)
        running._server.config.timeout_keep_alive = 0.5
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", running.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**12)
        writer.write(HEAD + LENGTH + b"\r\n" + BODY)
        async with asyncio.timeout(HANG_GUARD_S):
            head = await reader.readuntil(b"\r\n\r\n")
            left = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
            while not looks.empty():
                looks.get_nowait()  # it had not begun yet
            while left:
                part = await reader.readexactly(min(left, 1_000_000))
                left -= len(part)
                if left:
                    await looks.get()
        writer.close()
