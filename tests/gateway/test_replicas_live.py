"""Replicas that die, freeze, restart: real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.server import main
from tests.gateway.harness import HANG_GUARD_S, Replica, Running, gateway, tokens, until
from tests.support.processes import free_port


class WorkerProcess(Replica):
    """A fake worker in a process of its own, on a port that it keeps over restarts."""

    def __init__(self, *flags: str) -> None:
        super().__init__()
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "loadtest.fake_worker", "--port", str(self.port), *self._flags]
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(HANG_GUARD_S):
            line = await self._process.stdout.readline()
        self.port = int(line.rsplit(b":", 1)[1])

    def send(self, signal_number: int) -> None:
        assert self._process is not None
        self._process.send_signal(signal_number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def pair(**settings: object) -> AsyncIterator[tuple[Running, WorkerProcess, WorkerProcess]]:
    first = WorkerProcess("--state", "--tokens", "40", "--token-s", "0.01")
    second = WorkerProcess("--state", "--tokens", "40", "--token-s", "0.01")
    async with gateway(first, second, **settings) as running:
        yield running, first, second


async def test_a_killed_worker_under_load():
    """Each stream ends in exactly one way, new requests go elsewhere at once, and it comes back by itself."""
    async with pair() as (running, first, second):
        load = [asyncio.create_task(running.chat(True)) for _ in range(30)]
        await until(lambda: running.app.router.stats.num_in_flight + sum(task.done() for task in load) == 30)
        await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED, timeout=0.2)
        await first.kill()
        answers = await asyncio.gather(*load)
        for answer in answers:
            assert answer.status_code == 200
            got = tokens(answer.content)
            assert got == [f" t{n}" for n in range(len(got))], "no token lost, doubled or out of order"
            if answer.text.endswith("data: [DONE]\n\n"):
                assert len(got) == 40
            else:
                assert '{"error"' in answer.text.rstrip().splitlines()[-1]
        await until(lambda: running.events("warmgate_requests_total") == 30)  # counted once the last byte has gone
        await running.is_quiet()
        for _ in range(4):
            assert (await running.chat()).headers["x-warmgate-replica"] == second.name
        restarts = running.events("warmgate_replica_restarts_total")
        await first.start()
        await until(lambda: len(running.app.registry.ready()) == 2)
        assert running.events("warmgate_replica_restarts_total") == restarts + 1, "another incarnation is another cache"


async def test_a_stopped_worker_loses_what_waits_for_it():
    """SIGSTOP: it accepts and is silent. Requests of both kinds fail over, and new ones avoid it."""
    settings = {"first_token_s": 60.0, "poll_timeout_s": 0.2, "poll_failures": 2, "stuck_after_s": 0.5}
    async with pair(**settings) as (running, first, second):
        first.send(signal.SIGSTOP)
        answers = await asyncio.gather(*(running.chat(n % 4 < 2) for n in range(8)))
        for answer in answers:
            assert answer.status_code == 200
            assert tokens(answer.content) == [f" t{n}" for n in range(40)]
            assert answer.headers["x-warmgate-replica"] == second.name
        await until(lambda: [replica.replica_id for replica in running.app.registry.ready()] == [second.name])
        first.send(signal.SIGCONT)
        await until(lambda: len(running.app.registry.ready()) == 2)
        assert running.events("warmgate_replica_restarts_total") == 0, "the same process: its cache is still there"


async def test_a_first_token_timeout_alone_saves_a_request_from_a_stopped_worker():
    async with pair(first_token_s=0.3, poll_timeout_s=30.0) as (running, first, second):
        first.send(signal.SIGSTOP)
        for _ in range(2):
            assert (await running.chat(True)).headers["x-warmgate-replica"] == second.name
        first.send(signal.SIGCONT)


async def test_the_gateway_drains_on_sigterm_and_says_when_its_port_is_taken():
    replica = Replica()
    await replica.start()
    replica.play(token_s=0.02, num_tokens=20)
    command = [sys.executable, "-m", "gateway.server", "--replica", replica.url, "--policy", "round_robin", "--port"]
    process = await asyncio.create_subprocess_exec(
        *command, "0", stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        port = await _port_of(process)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_GUARD_S) as client:
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  # another process's state
                await asyncio.sleep(0.02)
            twice = await asyncio.create_subprocess_exec(*command, str(port), stderr=asyncio.subprocess.PIPE)
            _, complaint = await twice.communicate()
            assert twice.returncode == 3
            assert b"in use" in complaint
            assert len(complaint.splitlines()) == 1
            body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                process.terminate()
                content = await answer.aread()
            assert content.endswith(b"data: [DONE]\n\n"), "what is in flight may end"
        async with asyncio.timeout(HANG_GUARD_S):
            stdout, stderr = await process.communicate()
        assert process.returncode == 0, stderr
        assert b'"end":"completed"' in stdout, "the access log is written out before the end"
        assert b"Traceback" not in stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await replica.stop()


async def _port_of(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(HANG_GUARD_S):
        while line := await process.stderr.readline():
            if b"gateway on http://" in line:
                return int(line.split(b"http://")[1].split(b",")[0].rsplit(b":", 1)[1])
    raise AssertionError("the gateway did not start")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replica", "nonsense"], "replica URL"),
        (["--replica", "http://127.0.0.1:1", "--policy", "magic"], "magic"),
        (["--replica", "http://127.0.0.1:1", "--access-log", "/nowhere/x.log"], "/nowhere/x.log"),
        (["--replica", "http://127.0.0.1:1", "--host", "203.0.113.7", "--access-log", ""], "203.0.113.7"),
        ([], "--replica"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_a_wrong_start_is_one_sentence(flags, words, capsys):
    assert main(flags) in (2, 3)
    complaint = capsys.readouterr().err
    assert words in complaint
    assert len(complaint.splitlines()) == 1


async def test_a_replica_that_was_never_there_is_warned_of_once(caplog):
    port = free_port()
    with caplog.at_level(logging.WARNING, "warmgate.replicas"):
        async with gateway(urls=[f"http://127.0.0.1:{port}"], wait=False, poll_interval_s=0.01) as running:
            polled = running.app.registry.get(f"127.0.0.1:{port}")
            await until(lambda: "can't be used" in caplog.text)
            for _ in range(8):
                polled.detail = ""
                await until(lambda: polled.detail, "it is asked again")
    assert caplog.text.count("can't be used so far") == 1
