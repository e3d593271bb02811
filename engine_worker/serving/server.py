"""Runs the API process: the HTTP server, the engine's supervisor, and the ways to stop.

SIGTERM or SIGINT drains: new requests get 503 (health too, so that balancers look elsewhere) while those in flight go
on, up to the drain timeout; what is left then ends with an error, in its stream or as its status. A second signal
skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from engine_worker.contract.errors import ApiError
from engine_worker.serving.app import App
from engine_worker.serving.engine_supervisor import WorkerFailed
from engine_worker.serving.http_protocol import WorkerProtocol
from engine_worker.serving.worker import Worker

logger = logging.getLogger("warmgate.worker")

SEND_BUFFER_BYTES = 128 * 1024  # of the kernel, a connection (Linux takes twice that)
_TICK_S = 1.0  # of the date header
_CLOSE_S = 3  # for responses to be written out after the last request has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str
    port: int
    drain_timeout_s: float = 30.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, as stopping is more than closing sockets here, and without looking ten times
    a second whether it should stop: it is told."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # makes the date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket's address, taken before anything expensive starts. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: the kernel would let the buffer of each slow reader grow to megabytes.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


async def serve(worker: Worker, sock: socket.socket, options: ServerOptions) -> int:
    """Until told to stop, or until the worker has failed. Gives the process's exit code."""
    config = uvicorn.Config(
        App(worker),
        http=WorkerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that they close first
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config)
    stop = _Stop()
    with stop.on_signals():
        supervising = asyncio.create_task(worker.supervisor.run())
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        stopping = asyncio.create_task(stop.first.wait())
        await asyncio.wait((supervising, serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            _note_failure(worker, supervising)
        elif not serving.done():
            await _drain(worker, stop, options.drain_timeout_s)
        server.leave()
        if stop.second.is_set():
            server.force_exit = True
        await worker.supervisor.stop()
        await asyncio.gather(supervising, serving, return_exceptions=True)
        stopping.cancel()
    worker.executor.shutdown(wait=False, cancel_futures=True)
    return 1 if worker.failure is not None else 0


def _note_failure(worker: Worker, supervising: asyncio.Task[None]) -> None:
    try:
        supervising.result()
    except WorkerFailed as error:
        worker.failure = str(error)
    except Exception:
        logger.exception("the engine's supervisor failed")
        worker.failure = "The engine's supervisor failed."
    logger.error("%s", worker.failure)


class _Stop:
    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def _signalled(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def _drain(worker: Worker, stop: _Stop, timeout_s: float) -> None:
    worker.drain()
    if not worker.client.num_in_flight:
        return
    logger.info("draining: %d sequences in flight, %.0f s at most", worker.client.num_in_flight, timeout_s)
    idle = asyncio.create_task(worker.client.wait_idle())
    forced = asyncio.create_task(stop.second.wait())
    await asyncio.wait((idle, forced), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        worker.client.fail_all(
            ApiError(503, "The worker is shutting down and could not finish this request.", code="shutting_down")
        )
        with contextlib.suppress(TimeoutError):  # the calls close as their requests end
            await asyncio.wait_for(worker.client.wait_idle(), _CLOSE_S)
    for task in (idle, forced):
        task.cancel()
