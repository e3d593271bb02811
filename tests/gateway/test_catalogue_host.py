"""The failure catalogue's rows on the host: descriptors, disks, signals, a loop that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import httpx

from gateway import garbage
from gateway.observe.histogram import Buckets
from gateway.observe.lag import LoopWatch
from gateway.server import _listen
from gateway.upstream_connection import SOCKET_BUFFER_BYTES
from tests.gateway.harness import CHAT, HANG_GUARD_S, Replica, gateway, until


@contextlib.asynccontextmanager
async def served(
    replica: Replica, *flags: str, num_fds: int = 0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A gateway in a process of its own, and its port."""
    await replica.start()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_fds, num_fds))

    command = [
        sys.executable,
        "-m",
        "gateway.server",
        "--replica",
        replica.url,
        "--policy",
        "round_robin",
        "--port",
        "0",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        preexec_fn=limit if num_fds else None,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        async with asyncio.timeout(HANG_GUARD_S):
            while b"gateway on http://" not in (line := await process.stderr.readline()):
                assert line, "the gateway ended"
            port = int(line.split(b"127.0.0.1:")[1].split(b",")[0])
            async with httpx.AsyncClient(verify=False) as client:
                while (await client.get(f"http://127.0.0.1:{port}/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        yield process, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        await replica.stop()


async def test_out_of_file_descriptors_it_sheds_and_recovers():
    """Row 54."""
    replica = Replica()
    async with served(replica, num_fds=64) as (process, port):
        hoard = []
        for _ in range(100):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    hoard.append(await asyncio.open_connection("127.0.0.1", port))
        for _, writer in hoard:
            writer.close()
        async with asyncio.timeout(HANG_GUARD_S), httpx.AsyncClient(verify=False, timeout=5.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)).is_success:
                        break
                await asyncio.sleep(0.05)
        assert process.returncode is None


async def test_a_full_disk_costs_log_lines_and_no_request(caplog):
    """Row 55."""
    async with gateway(Replica(), access_log="/dev/full") as running:
        assert (await running.chat()).status_code == 200
        await until(lambda: any("could not be written" in record.message for record in caplog.records))
        assert (await running.chat()).status_code == 200


async def test_a_terminated_gateway_says_it_is_unready_before_it_stops_listening():
    """Row 56: unready first, then drained."""
    replica = Replica()
    async with served(replica, "--unready-s", "2") as (process, port):
        process.send_signal(signal.SIGTERM)
        async with (
            httpx.AsyncClient(verify=False, base_url=f"http://127.0.0.1:{port}") as client,
            asyncio.timeout(HANG_GUARD_S),
        ):
            while (await client.get("/ready")).status_code != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert await process.wait() == 0


async def test_a_second_signal_forces_the_end():
    """Row 56: what is under way doesn't hold it any longer."""
    replica = Replica()
    async with served(replica, "--drain-s", "600") as (process, port):
        replica.play(fault="stall", after=1)
        async with httpx.AsyncClient(verify=False, timeout=HANG_GUARD_S) as client:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            stream = client.stream("POST", url, json={**CHAT, "stream": True})
            async with stream as answer, asyncio.timeout(HANG_GUARD_S):
                assert answer.status_code == 200
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(httpx.HTTPError):
                    while True:
                        await client.get(f"http://127.0.0.1:{port}/ready")
                process.send_signal(signal.SIGTERM)
                await process.wait()


async def test_a_loop_that_stands_still_is_noticed_and_named(caplog):
    """Row 57."""
    lag = Buckets((0.1, 1.0))
    watch = LoopWatch(lag, blocked_s=0.1)
    with caplog.at_level(logging.ERROR, "warmgate.loop"):
        watch.start()
        began = time.monotonic()
        while time.monotonic() < began + 0.5 or (not watch.num_blocked and time.monotonic() < began + HANG_GUARD_S):
            time.sleep(0.01)  # noqa: ASYNC251  # the very thing
        await until(lambda: sum(lag.counts) > 0)
        watch.close()
    assert watch.num_blocked >= 1
    assert "test_a_loop_that_stands_still" in caplog.text
    assert lag.total > 0


async def test_full_collections_wait_for_a_quiet_moment_but_not_for_ever(monkeypatch):
    """Row 57: a collection of everything stops everything."""
    collected = asyncio.Event()
    idle = False
    collections = garbage.FullCollections(lambda: idle, collected.set, every_s=0.01)
    collections.start()
    await asyncio.sleep(0.1)
    assert not collected.is_set()
    idle = True
    await collected.wait()
    idle = False
    await asyncio.sleep(0.02)
    collected.clear()
    monkeypatch.setattr(garbage, "MAX_WAIT_S", 0.05)
    await collected.wait()
    collections.close()


def test_the_kernel_keeps_no_more_for_a_slow_reader_than_was_allowed_it():
    """Row 27. Left to itself it lets a buffer grow to megabytes; of a thousand readers that costs everybody packets."""
    listener = _listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SOCKET_BUFFER_BYTES
