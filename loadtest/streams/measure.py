"""The three measurements, each over a gateway that was started for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from loadtest.chaos.processes import Gateway
from loadtest.chaos.quiesce import rss_bytes
from loadtest.chaos.wire import Wire, connect, request_head
from loadtest.records import percentile

PATH = "/v1/chat/completions"
OPENING_AT_ONCE = 100
_SLOW_TOKENS = 5000  # of _SLOW_TOKEN_BYTES: more than all buffers on the way hold
_SLOW_TOKEN_BYTES = 2000  # large ones fill them with little work
_SETTLE_LIMIT_S = 180.0
_IDLE_SHARE = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SLOW_BUFFER_BYTES = 2048
_LAG = re.compile(r'^warmgate_loop_lag_seconds_bucket{le="([^"]+)"} (\S+)$', re.MULTILINE)


class Failed(Exception):
    """The measurement could not be made as asked; one sentence."""


def body_of(num_tokens: int, text: str = "hi", tag: str = "") -> bytes:
    body = {"model": "fake", "stream": True, "max_tokens": num_tokens, "fake_tag": tag}
    return msgspec.json.encode({**body, "messages": [{"role": "user", "content": text}]})


async def one_stream(gateway: Gateway, wire: Wire, name: str, body: bytes, on_body: Callable[[bytes], None]) -> None:
    """A whole stream. Raises Failed."""
    await wire.exchange(request_head(PATH, gateway.port, name, len(body)), body, on_body)
    if wire.status != 200 or not wire.ended_well:
        raise Failed(f"a stream was not answered: status {wire.status}")


@dataclass(frozen=True, slots=True)
class Idle:
    """`lag_p99_s` is the upper bound of the histogram's bucket that it fell into."""

    num_streams: int
    bytes_a_stream: float
    lag_p99_s: float
    num_beats: int


async def idle(gateway: Gateway, num_streams: int, hold_s: float, tell: Callable[[str], None]) -> Idle:
    """Raises Failed, OSError."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        await _warm_up(gateway)
        before = rss_bytes(gateway.child.pid)
        wires: list[Wire] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            await _opened(gateway, num_streams, wires, tasks)
            tell(f"{num_streams} streams are open")
            await asyncio.sleep(2.0)
            lags = await _lags(gateway, client)
            await asyncio.sleep(hold_s)
            beats = {bound: count - lags[bound] for bound, count in (await _lags(gateway, client)).items()}
            if num_lost := sum(task.done() for task in tasks):
                raise Failed(f"{num_lost} of {num_streams} streams ended while they were held")
            grown = rss_bytes(gateway.child.pid) - before
        finally:
            for wire in wires:
                wire.abort()
            await asyncio.gather(*tasks, return_exceptions=True)
    num_beats = round(beats[float("inf")])
    p99 = min(bound for bound, count in beats.items() if count >= 0.99 * num_beats)
    return Idle(num_streams, grown / num_streams, p99, num_beats)


async def _warm_up(gateway: Gateway) -> None:
    """So that what is allocated once is not counted to the first streams."""
    wire = await connect("127.0.0.1", gateway.port)
    for number in range(200):
        await one_stream(gateway, wire, f"warm-{number}", body_of(1), lambda data: None)
    wire.abort()


async def _opened(gateway: Gateway, num_streams: int, wires: list[Wire], tasks: list[asyncio.Task[None]]) -> None:
    """Streams that have had their first token and will get no second one."""
    places = asyncio.Semaphore(OPENING_AT_ONCE)
    body = body_of(2)

    async def open_one(number: int) -> None:
        async with places:
            wire = await connect("127.0.0.1", gateway.port)
            wires.append(wire)
            first = asyncio.Event()
            task = asyncio.create_task(one_stream(gateway, wire, f"idle-{number}", body, lambda data: first.set()))
            tasks.append(task)
            waiting = asyncio.create_task(first.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                task.result()
                raise Failed("a stream ended at once instead of staying idle")

    async with asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(open_one(number))


async def _lags(gateway: Gateway, client: httpx.AsyncClient) -> dict[float, float]:
    text = (await client.get(f"{gateway.url}/metrics", timeout=30.0)).text
    return {float(bound): float(count) for bound, count in _LAG.findall(text)}


@dataclass(frozen=True, slots=True)
class Slow:
    """p99 of others' first tokens and whole answers, in each phase; `ratio` of the medians of the phases."""

    num_readers: int
    num_left: int
    alone_s: list[tuple[float, float]]
    beside_s: list[tuple[float, float]]

    @property
    def ratios(self) -> tuple[float, float]:
        """Beside to alone, of the first token's and of the whole answer's p99."""
        first = median(each[0] for each in self.beside_s) / median(each[0] for each in self.alone_s)
        return first, median(each[1] for each in self.beside_s) / median(each[1] for each in self.alone_s)


async def slow(
    gateway: Gateway, pids: list[int], num_readers: int, rounds: int, phase_s: float, tell: Callable[[str], None]
) -> Slow:
    """`pids` are those of the gateway and its workers. Raises Failed, OSError."""
    await _warm_up(gateway)
    alone, beside, num_left = [], [], num_readers
    for number in range(rounds):
        alone.append(await _others(gateway, phase_s))
        async with _slow_readers(gateway, num_readers) as readers:
            await _settled(pids)
            beside.append(await _others(gateway, phase_s))
            num_left = min(num_left, sum(not reader.done() for reader in readers))
        tell(f"round {number + 1}: p99 of a whole answer {alone[-1][1]:.3f} s alone, {beside[-1][1]:.3f} s beside")
    return Slow(num_readers, num_left, alone, beside)


async def _settled(pids: list[int]) -> None:
    """Until the buffers of slow readers are full, so that nobody works any more. Raises Failed."""
    await asyncio.sleep(1.5)  # while readers come
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    while time.monotonic() < deadline:
        before = sum(map(_cpu_s, pids))
        await asyncio.sleep(1.0)
        if sum(map(_cpu_s, pids)) - before < _IDLE_SHARE:
            return
    raise Failed(f"{_SETTLE_LIMIT_S:g} s did not do to fill the buffers of the slow readers")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def _others(gateway: Gateway, phase_s: float, num_clients: int = 8, num_tokens: int = 20) -> tuple[float, float]:
    """p99 of the first token and of the whole answer, of ordinary clients."""
    firsts: list[float] = []
    wholes: list[float] = []
    until = time.monotonic() + phase_s
    body = body_of(num_tokens)

    async def client(number: int) -> None:
        wire = await connect("127.0.0.1", gateway.port)
        while time.monotonic() < until:
            sent_at = time.monotonic()
            await one_stream(gateway, wire, f"other-{number}", body, lambda data: None)
            assert wire.first_byte_at is not None
            firsts.append(wire.first_byte_at - sent_at)
            wholes.append(time.monotonic() - sent_at)
        wire.abort()

    await _together(client(number) for number in range(num_clients))
    return percentile(firsts, 0.99), percentile(wholes, 0.99)


@contextlib.asynccontextmanager
async def _slow_readers(gateway: Gateway, count: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    body = body_of(_SLOW_TOKENS, tag="x" * _SLOW_TOKEN_BYTES)
    request = request_head(PATH, gateway.port, "slow", len(body)) + body
    loop = asyncio.get_running_loop()

    async def read(number: int) -> None:
        with socket.socket() as own:
            own.setblocking(False)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
            await asyncio.sleep(number / count)
            await loop.sock_connect(own, ("127.0.0.1", gateway.port))
            await loop.sock_sendall(own, request)
            while await loop.sock_recv(own, 1):  # noqa: ASYNC110  # that is its pace
                await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(read(number)) for number in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Memory:
    num_requests: int
    early_bytes: int
    late_bytes: int
    requests_per_s: float


async def memory(gateway: Gateway, num_requests: int, num_clients: int, tell: Callable[[str], None]) -> Memory:
    """Raises Failed, OSError."""
    began = time.monotonic()
    early = 0
    done = 0
    numbers = iter(range(num_requests))

    async def client() -> None:
        nonlocal early, done
        wire = await connect("127.0.0.1", gateway.port)
        for number in numbers:
            body = body_of(3, f"request {number} of many, each with a prompt of its own")
            await one_stream(gateway, wire, f"memory-{number}", body, lambda data: None)
            done += 1
            if done == max(1, num_requests // 10):
                early = rss_bytes(gateway.child.pid)
            if done % max(1, num_requests // 10) == 0:
                tell(f"{done} requests: {rss_bytes(gateway.child.pid) / 2**20:.1f} MiB")
        wire.abort()

    await _together(client() for _ in range(num_clients))
    return Memory(num_requests, early, rss_bytes(gateway.child.pid), num_requests / (time.monotonic() - began))


async def _together(jobs: Any) -> None:
    """All of them; the first that fails ends the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
