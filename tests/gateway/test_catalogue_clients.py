"""The failure catalogue's rows on clients, where other files leave them open."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from loadtest.fake_script import Script
from tests.gateway.harness import CHAT, HANG_GUARD_S, Replica, Running, gateway, tokens, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


def request(body: bytes, extra: bytes = b"") -> bytes:
    return HEAD + extra + b"content-length: %d\r\n\r\n" % len(body) + body


async def connect(running: Running, read_buffer: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    own = socket.socket()
    if read_buffer:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", running.port))
    return await asyncio.open_connection(sock=own, limit=2**10)


def ended(running: Running, end: str) -> float:
    samples = [s for metric in running.app.metrics.registry.collect() for s in metric.samples]
    return sum(s.value for s in samples if s.name == "warmgate_requests_total" and s.labels["end"] == end)


async def test_a_client_that_leaves_while_it_waits_for_its_turn_starts_nothing():
    """Row 25, queued."""
    replica = Replica()
    async with gateway(replica, max_in_flight=1) as running:
        replica.play(first_token_s=0.5)
        first = asyncio.create_task(running.chat(True))
        await until(lambda: replica.log.num_in_flight == 1)
        _, writer = await connect(running)
        writer.write(request(json.dumps(CHAT).encode()))
        await until(lambda: running.app.admission.num_queued == 1)
        writer.close()
        await until(lambda: running.app.admission.num_queued == 0)
        assert (await first).status_code == 200
        assert replica.log.num_started == 1
        await until(lambda: ended(running, "client_gone") == 1)


async def test_a_body_in_a_transfer_coding_beside_chunked_is_refused():
    """Read as it stands, it would be something else here than at whoever decodes it."""
    body = json.dumps(CHAT).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with gateway(Replica()) as running:
        for coding, status in ((b"gzip, chunked", b"415"), (b"Chunked", b"200")):
            reader, writer = await connect(running)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %b\r\n\r\n" % coding)
            writer.write(chunks)
            async with asyncio.timeout(HANG_GUARD_S):
                assert (await reader.readline()).split()[1] == status
            writer.close()


async def test_a_slow_reader_holds_a_bounded_buffer_and_others_are_served():
    """Row 27: the replica writes no further than buffers reach; what is read comes whole and in order."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(num_tokens=20_000)
        reader, writer = await connect(running, read_buffer=4096)
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode(), b"connection: close\r\n"))
        await reader.readuntil(b" t0")
        cycles = [connection.cycle for connection in _connections(running) if connection.cycle is not None]
        await until(lambda: any(cycle.is_paused for cycle in cycles))
        assert replica.log.num_in_flight == 1, "it could not write all"
        slow_script, replica.worker.script = replica.worker.script, Script()
        assert tokens((await running.chat(True)).content) == [f" t{n}" for n in range(8)]
        replica.worker.script = slow_script
        rest = bytearray(b" t0")
        while data := await reader.read(2**20):
            rest += data
        assert tokens(bytes(rest)) == [f" t{n}" for n in range(20_000)]
        assert b"[DONE]" in rest
        writer.close()


async def test_a_client_that_leaves_while_its_buffer_is_full_is_noticed():
    """Row 28: disconnect while sending waits."""
    replica = Replica()
    async with gateway(replica, stream_idle_s=60.0) as running:
        replica.play(num_tokens=2_000_000)
        reader, writer = await connect(running, read_buffer=4096)
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()))
        await reader.readuntil(b" t0")
        cycles = [c.cycle for c in _connections(running) if c.cycle is not None]
        await until(lambda: any(cycle.is_paused for cycle in cycles))
        writer.transport.abort()
        await until(lambda: replica.log.num_aborted == 1)
        await until(lambda: ended(running, "client_gone") == 1)


def _connections(running: Running):
    return running._server.server_state.connections


async def test_a_client_that_leaves_at_once_leaves_nothing_behind():
    """Row 29: gone before the request's task has taken its first step."""
    replica = Replica()
    async with gateway(replica) as running:
        for _ in range(20):
            _, writer = await connect(running)
            writer.write(request(json.dumps(CHAT).encode()))
            writer.transport.abort()
        await until(lambda: not _connections(running) or all(c.cycle is None for c in _connections(running)))
        await running.is_quiet()
        assert running.app.admission.num_in_flight == 0


async def test_a_clients_retry_after_its_own_timeout_does_not_stack():
    """Row 31: each attempt that it gave up is gone from the replica."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="stall")
        for attempt in range(1, 4):
            _, writer = await connect(running)
            writer.write(request(json.dumps(CHAT).encode()))
            await until(lambda count=attempt: replica.log.num_started == count)
            assert replica.log.num_in_flight == 1
            writer.close()
            await until(lambda: replica.log.num_in_flight == 0)
        assert running.app.router.stats.num_in_flight == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_a_client_that_sends_on_after_its_refusal_can_read_it(declared):
    """Row 36. Closed at once, its next bytes would have the connection reset, and the answer lost with it."""
    replica = Replica()
    async with gateway(replica, max_body_bytes=1024) as running:
        reader, writer = await connect(running)
        piece = b"%x\r\n%b\r\n" % (2**16, b"x" * 2**16)
        writer.write(HEAD + (b"content-length: 67108864" if declared else b"transfer-encoding: chunked") + b"\r\n\r\n")
        async with asyncio.timeout(HANG_GUARD_S):
            for _ in range(128):
                writer.write(piece)
                await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            assert b'"message":"The request body is larger' in await reader.read()
        writer.close()


@pytest.mark.parametrize("extra", [b"x-a: b\r\n c\r\n", b"x-a : b\r\n", b"transfer-encoding: gzip\r\n"])
async def test_headers_that_two_servers_could_read_differently_are_refused(extra):
    """Row 34: obs-fold, a blank before the colon, an unknown transfer coding."""
    replica = Replica()
    async with gateway(replica) as running:
        reader, writer = await connect(running)
        writer.write(request(b"{}", extra))
        async with asyncio.timeout(HANG_GUARD_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert replica.log.num_started == 0
        writer.close()


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_an_upgrade_is_declined_and_the_request_served(in_pieces):
    """Row 34. Some clients offer h2c with every request; it is read as if they had not."""
    replica = Replica()
    async with gateway(replica) as running:
        body = json.dumps(CHAT).encode()
        upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        reader, writer = await connect(running)
        sent = request(body, upgrade) + HEAD + upgrade + chunked + request(body, b"connection: close\r\n")
        size = 50 if in_pieces else len(sent)
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        async with asyncio.timeout(HANG_GUARD_S):
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert replica.log.last_body.encode() == body
        writer.close()


@pytest.mark.parametrize(
    "field",
    [
        b'"temperature": NaN',
        b'"temperature": Infinity',
        b'"temperature": 1e999',
        b'"max_tokens": 1' + b"0" * 400,
        b'"max_tokens": -1',
        b'"n": 0',
        b'"n": 100000',
        b'"stop": [' + b",".join([b'"x"'] * 1000) + b"]",
        b'"stop": "' + b"x" * 100_000 + b'"',
        b'"logit_bias": {' + b",".join(b'"%d": 1' % n for n in range(10_000)) + b"}",
        b'"user": "\\ud800"',
        b'"user": "\xff"',
        b'"stream": false, "stream": true',
        b'"x": ' + b"[" * 20_000 + b"]" * 20_000,
        b'"x": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    ],
    ids=lambda field: field[:24].decode("latin-1"),
)
async def test_values_that_no_engine_should_see_are_refused_before_anything_is_allocated(field):
    """Rows 37 to 41."""
    replica = Replica()
    async with gateway(replica) as running:
        body = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}], ' + field + b"}"
        answer = await running.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert replica.log.num_started == 0


async def test_internal_and_hop_by_hop_headers_of_a_client_go_nowhere():
    """Row 42."""
    replica = Replica()
    async with gateway(replica) as running:
        forged = {
            "connection": "keep-alive, x-own",
            "x-own": "1",
            "te": "trailers",
            "proxy-authorization": "Basic x",
            "x-warmgate-replica": "other",
            "x-warmgate-cached-tokens": "9",
            "x-data-parallel-rank": "1",
            "x-target-endpoint": "http://evil",
            "x-forwarded-for": "1.1.1.1",
            "forwarded": "for=1.1.1.1",
        }
        answer = await running.client.post("/v1/chat/completions", json=CHAT, headers=forged)
        assert answer.status_code == 200
        assert answer.headers["x-warmgate-replica"] == replica.name
        assert not set(forged) & set(replica.log.last_headers)


async def test_an_http_1_0_client_gets_a_body_that_ends_with_the_connection():
    """It knows no chunks."""
    replica = Replica()
    async with gateway(replica) as running:
        reader, writer = await connect(running)
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        async with asyncio.timeout(HANG_GUARD_S):
            head, body = (await reader.read()).split(b"\r\n\r\n", 1)
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_a_client_that_never_reads_a_large_answer_is_dropped_after_the_idle_time():
    """Row 27, not streamed: a graceful close would wait for it for ever."""
    replica = Replica()
    async with gateway(replica) as running:
        running._server.config.timeout_keep_alive = 0.3
        replica.play(num_tokens=1_000_000)
        _, writer = await connect(running, read_buffer=4096)
        writer.write(request(json.dumps(CHAT).encode()))
        await until(lambda: ended(running, "completed") == 1)
        await until(lambda: not _connections(running))
        writer.close()


async def test_the_next_request_on_a_connection_is_watched_though_the_last_ones_replica_dawdles():
    """The client has its answer before the replica's body ends; what follows is another request with its own watch."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(end_s=0.5)
        reader, writer = await connect(running)
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()))
        answer = b""
        while b"[DONE]" not in answer:
            answer += await reader.read(1024)
        replica.play(fault="stall", after=0)
        writer.write(request(json.dumps({**CHAT, "stream": True}).encode()))
        await until(lambda: replica.log.num_started == 2)
        await until(lambda: replica.log.num_in_flight == 1)  # the first is over, in the gateway too before long
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: replica.log.num_aborted >= 1)
        await until(lambda: ended(running, "client_gone") == 1)
