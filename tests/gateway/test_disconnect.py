"""A client that leaves, in any phase, streaming or not: the replica hears of it, the lease ends, nobody is blamed."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.gateway.harness import CHAT, HANG_GUARD_S, Replica, Running, gateway, until


class RawClient:
    """An HTTP client of a few lines that can leave whenever it likes."""

    def __init__(self, running: Running, stream: bool, read_buffer: int = 0) -> None:
        self._running = running
        self._body = json.dumps({**CHAT, "stream": stream}).encode()
        self._read_buffer = read_buffer

    async def send(
        self, headers_only: bool = False, times: int = 1
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        if self._read_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._read_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._running.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**10)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self._body)}\r\n\r\n"
        writer.write((head.encode() + (b"" if headers_only else self._body)) * times)
        await writer.drain()
        return reader, writer


PHASES = {
    "before the first token": {"fault": "stall", "after": 0},
    "in mid-stream": {"fault": "stall", "after": 3},
    "while tokens flow": {"token_s": 0.01, "num_tokens": 10_000},
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_disconnect_reaches_the_replica(phase, stream):
    """Row 25."""
    replica, other = Replica(), Replica()
    async with gateway(replica, other) as running:
        replica.play(**PHASES[phase])
        other.play(**PHASES[phase])
        reader, writer = await RawClient(running, stream).send()
        await until(lambda: replica.log.num_in_flight + other.log.num_in_flight == 1)
        if stream and phase != "before the first token":
            await reader.readuntil(b" t2")
        writer.close()
        await until(lambda: replica.log.num_aborted + other.log.num_aborted == 1)
        await until(lambda: running.app.router.stats.num_in_flight == 0)
        assert replica.log.num_started + other.log.num_started == 1, "a client that left is not failed over"
        await until(lambda: _ended(running, "client_gone") == 1)
        assert len(running.app.registry.ready()) == 2, "a cancel says nothing about the replica"


async def test_a_client_that_leaves_while_it_sends_its_body_starts_nothing():
    replica = Replica()
    async with gateway(replica) as running:
        _, writer = await RawClient(running, stream=True).send(headers_only=True)
        writer.close()
        await until(lambda: _ended(running, "client_gone") == 1)
        assert replica.log.num_started == 0


async def test_a_client_that_does_not_read_is_dropped_and_holds_nothing():
    """Row 27: the replica's stream is not read on for it, and after the idle time it is gone."""
    replica = Replica()
    async with gateway(replica, stream_idle_s=0.3) as running:
        replica.play(num_tokens=2_000_000)
        _, writer = await RawClient(running, stream=True, read_buffer=4096).send()
        await until(lambda: _ended(running, "client_gone") == 1)
        await until(lambda: replica.log.num_aborted == 1)
        writer.close()


@pytest.mark.parametrize("then", [{"num_tokens": 200_000}, {"fault": "status", "status": 400}], ids=str)
async def test_a_client_that_does_not_read_whole_answers_is_dropped_and_holds_nothing(then, caplog):
    """An answer that waits for it to read the one before doesn't wait for longer than a stream would."""
    replica = Replica()
    async with gateway(replica, stream_idle_s=0.3, max_in_flight=1, queue_s=HANG_GUARD_S / 2) as running:
        replica.play(num_tokens=200_000)
        reader, writer = await RawClient(running, stream=False, read_buffer=4096).send(times=2)
        await until(lambda: replica.log.num_started == 1)
        replica.play(**then)
        await until(lambda: replica.log.num_started == 2)
        replica.play()
        assert (await running.chat()).status_code == 200
        while await reader.read(2**20):
            pass
        writer.close()
    assert "ASGI" not in caplog.text


async def test_many_that_leave_together_leave_nothing_behind():
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(token_s=0.005, num_tokens=10_000)
        connections = [await RawClient(running, stream=n % 2 == 0).send() for n in range(20)]
        await until(lambda: replica.log.num_in_flight == 20)
        for _, writer in connections:
            writer.close()
        await until(lambda: replica.log.num_aborted == 20)
        await until(lambda: _ended(running, "client_gone") == 20)
        assert running.app.fleet.num_leases() == 0


async def test_a_forced_stop_ends_streams_in_an_error_event():
    """Row 56: what is left after the drain time ends in one way, too."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="stall", after=2)
        reader, writer = await RawClient(running, stream=True).send()
        await reader.readuntil(b" t1")
        running.stop()
        rest = await reader.read(2**20)
        while b"error" not in rest:
            more = await reader.read(2**20)
            assert more, rest
            rest += more
        assert b"shutting down" in rest
        assert b"[DONE]" not in rest
        writer.close()


def _ended(running: Running, end: str) -> float:
    samples = [s for metric in running.app.metrics.registry.collect() for s in metric.samples]
    return sum(s.value for s in samples if s.name == "warmgate_requests_total" and s.labels["end"] == end)
