"""A gateway and fake replicas on real sockets of the test's own loop. Everything is awaited, nothing is slept for."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from gateway.app import Gateway, create_app
from gateway.config import GatewaySettings
from gateway.server import _listen, _Server, _uvicorn_config
from loadtest.fake_script import Script
from loadtest.fake_worker import FakeWorker

HANG_GUARD_S = 30.0
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait until `condition()` holds. The limit is a guard against hanging, not a measurement."""
    async with asyncio.timeout(HANG_GUARD_S):
        while not condition():  # noqa: ASYNC110  # conditions of other tasks, and of other processes
            await asyncio.sleep(0.005)


class Replica:
    """A fake worker on a port of its own, which it keeps over stops and starts."""

    def __init__(self, model: str = "fake", script: Script | None = None, incarnation: str = "") -> None:
        self.worker = FakeWorker(model, script or Script(), bool(incarnation), incarnation)
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Any:
        return self.worker.log

    def play(self, **fields: Any) -> None:
        """Replace the script."""
        self.worker.script = Script(**fields)

    async def start(self) -> None:
        self._server = await self.worker.listen("127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on, and cut those there are."""
        if self._server is not None:
            self._server.close()
            self.worker.cut_connections()
            self._server = None


class Running:
    """A gateway that serves, its replicas, and a client."""

    def __init__(
        self, app: Gateway, server: _Server, replicas: list[Replica], port: int, client: httpx.AsyncClient
    ) -> None:
        self.app = app
        self._server = server
        self.replicas = replicas
        self.port = port
        self.client = client

    async def chat(self, stream: bool = False, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={**CHAT, "stream": stream, **fields})

    def events(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        samples = [sample for metric in self.app.metrics.registry.collect() for sample in metric.samples]
        return sum(sample.value for sample in samples if sample.name == name)

    def stop(self) -> None:
        """What a signal does; a second one ends at once."""
        self._server.handle_exit(signal.SIGTERM, None)

    async def is_quiet(self) -> None:
        """Nothing in flight, no lease held: what must hold after every test."""
        await until(lambda: self.app.router.stats.num_in_flight == 0)
        await until(lambda: self.app.fleet.num_leases() == 0)
        self.app.router.check_invariants()
        await until(lambda: self.app.admission.num_in_flight == 0)
        self.app.admission.check_invariants()
        assert not any(replica.waiting for replica in self.app.registry)


@contextlib.asynccontextmanager
async def gateway(
    *replicas: Replica,
    wait: bool = True,
    server_http: str | None = None,
    urls: list[str] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A gateway in front of `replicas`, which are started here; ready when all have joined (unless `wait` is False).

    `urls` are those that it is to reach them by, where it is not their own.
    """
    for replica in replicas:
        if replica.port == 0:
            await replica.start()
    values = {"policy": "round_robin", "poll_interval_s": 0.05, "access_log": "", "drain_s": 2.0, **settings}
    options = GatewaySettings(replicas=urls or [replica.url for replica in replicas], port=0, **values)
    app = create_app(options)
    listener = _listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = _uvicorn_config(app, options)
    if server_http is not None:
        config.http = server_http
    server = _Server(config, app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or task.done())
        if wait:
            await until(lambda: len(app.registry.ready()) == len(replicas))
        base_url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=HANG_GUARD_S, verify=False) as client:
            running = Running(app, server, list(replicas), port, client)
            yield running
            await running.is_quiet()
    finally:
        server.should_exit = True
        async with asyncio.timeout(HANG_GUARD_S):
            await task
        for replica in replicas:
            await replica.stop()


def free_address() -> tuple[str, int]:
    """An address where nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address: tuple[str, int] = probe.getsockname()
        return address


def tokens(body: bytes) -> list[str]:
    """The numbered tokens in a relayed body, in order."""
    return [match.decode() for match in re.findall(rb" t\d+", body)]
