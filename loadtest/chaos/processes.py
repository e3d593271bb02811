"""The processes of a run: gateways, workers behind their links, Redis. Each keeps its port over its lives."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from loadtest.toxic import Link

START_LIMIT_S = 120.0
_GRACE_S = 20.0
_REDIS_FLAGS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In a child, before it becomes the command: nothing of a run outlives it, however it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class NotStarted(Exception):
    """A process didn't come up, or ended by itself; the message ends with its last output."""


class Child:
    """A process in a group of its own, its output in `log`. `num_deaths` counts ends that nobody asked for."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.num_deaths = 0
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("WARMGATE_")}
        self._env.update(env or {}, PYTHONUNBUFFERED="1")
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = False
        log.unlink(missing_ok=True)  # an earlier run's

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self._wanted = True

    def signal(self, number: signal.Signals) -> None:
        """To all of its group, as when a machine goes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def end(self, number: signal.Signals) -> int:
        """Send `number` and wait; what is still there after the grace is killed. Returns its status."""
        assert self._process is not None
        self._wanted = False
        if number is signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        else:
            self.signal(number)
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.signal(signal.SIGKILL)
        return await self._process.wait()

    def check(self) -> None:
        """Raises NotStarted if it ended though nobody ended it."""
        if self._wanted and not self.is_running:
            assert self._process is not None
            self.num_deaths += 1
            self._wanted = False
            raise NotStarted(f"{self.name} ended by itself with {self._process.returncode}:\n{self.output()}")

    def output(self) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-25:])

    async def until_ok(self, url: str, client: httpx.AsyncClient) -> None:
        """Raises NotStarted."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)
        raise NotStarted(f"{self.name} did not answer {url} within {START_LIMIT_S:g} s:\n{self.output()}")


class Worker:
    """A worker behind a link. Gateways know only the link's port, which is shut while the worker is dead."""

    def __init__(self, number: int, child: Child, port: int, health: str) -> None:
        self.number = number
        self.child = child
        self.port = port
        self.link = Link("127.0.0.1", port)
        self._health = f"http://127.0.0.1:{port}{health}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.link.toxic.port}"

    @property
    def replica_id(self) -> str:
        return f"127.0.0.1:{self.link.toxic.port}"

    async def start(self, client: httpx.AsyncClient) -> None:
        await self.child.start()
        await self.child.until_ok(self._health, client)
        await self.link.open()

    async def kill(self) -> None:
        self.link.shut()
        await self.child.end(signal.SIGKILL)


class Gateway:
    """`downs` are its times of dying: from the signal until it was ready again (inf: not yet).

    is_ready   what a load balancer in front of it believes
    since      when its present process was ready first
    """

    def __init__(self, number: int, child: Child, port: int, access_log: Path) -> None:
        self.number = number
        self.child = child
        self.port = port
        self.access_log = access_log
        access_log.unlink(missing_ok=True)  # lines of an earlier run would count
        self.is_ready = False
        self.since = 0.0
        self.downs: list[list[float]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, client: httpx.AsyncClient) -> None:
        await self.child.start()
        await self.child.until_ok(f"{self.url}/ready", client)
        self.since = time.monotonic()
        self.is_ready = True
        if self.downs:
            self.downs[-1][1] = self.since

    async def end(self, number: signal.Signals) -> int:
        self.downs.append([time.monotonic(), float("inf")])
        return await self.child.end(number)

    def was_down(self, start: float, end: float) -> bool:
        return any(down <= end and start <= up for down, up in self.downs)


class Redis:
    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.port = port

    async def start(self) -> None:
        await self.child.start()
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            self.child.check()
            with contextlib.suppress(OSError, TimeoutError):
                if await self.command("PING") == b"+PONG\r\n":
                    return
            await asyncio.sleep(0.02)
        raise NotStarted(f"redis-server did not answer:\n{self.child.output()}")

    async def command(self, word: str) -> bytes:
        """Raises OSError, TimeoutError."""
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(f"*1\r\n${len(word)}\r\n{word}\r\n".encode())
                return await reader.readline()
            finally:
                writer.close()


def make_redis(port: int, folder: Path) -> Redis:
    """Raises NotStarted when there is no redis-server to start."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise NotStarted("redis-server is not installed: `apt-get install redis-server`, or run with --no-redis")
    flags = (*_REDIS_FLAGS, "--port", str(port), "--dir", str(folder))
    return Redis(Child("redis", [binary, *flags], folder / "redis.log"), port)


def make_gateway(
    number: int, port: int, urls: Sequence[str], redis_port: int | None, folder: Path, options: Sequence[str]
) -> Gateway:
    log = folder / f"gateway{number}.access.jsonl"
    replicas = [part for url in urls for part in ("--replica", url)]
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), *replicas]
    command += ["--access-log", str(log), "--log-level", "warning", *options]
    env = {} if redis_port is None else {"WARMGATE_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0"}
    return Gateway(number, Child(f"gateway {number}", command, folder / f"gateway{number}.log", env), port, log)


def make_worker(number: int, port: int, command: Sequence[str], folder: Path, health: str) -> Worker:
    child = Child(f"worker {number}", [*command, "--port", str(port)], folder / f"worker{number}.log")
    return Worker(number, child, port, health)


def free_ports(count: int) -> list[int]:
    """Free now, and below the range from which the system itself takes ports, so that they stay so over restarts."""
    found: list[int] = []
    candidate = 20_000 + os.getpid() * 7 % 10_000
    while len(found) < count:
        candidate = candidate + 1 if candidate < 31_900 else 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            found.append(candidate)
    return found
