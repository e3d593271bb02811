"""Running the gateway: uvicorn around the application, with limits on headers, a clean start and a clean stop.

SIGTERM or Ctrl-C: no new connections, requests in flight get `drain_s` to end, what is left then ends in an error
event or a 503. A second signal ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn

from gateway import compiled, garbage, openness
from gateway.admission import raise_fd_limit
from gateway.app import Gateway, create_app
from gateway.config import ConfigError, GatewaySettings, load_settings
from gateway.config_words import unknown_variables
from gateway.observe.trace_file import TraceFileError
from gateway.plain_protocol import PlainProtocol
from gateway.processes import Place, listeners, run_processes, share_of
from gateway.siblings import Siblings
from gateway.tenancy.keys import KeysError
from gateway.upstream_connection import SOCKET_BUFFER_BYTES
from policies.registry import UnknownPolicy

_log = logging.getLogger("warmgate")
_LAST_WORDS_S = 1.0  # after a second signal: for telling clients, and for what is to be written
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s{}: %(message)s"
EXIT_USAGE = 2
EXIT_PORT = 3


def run(settings: GatewaySettings) -> int:
    """Serve until a signal. Returns the process's exit code; what is wrong is said in one sentence on stderr."""
    logging.basicConfig(level=settings.log_level.upper(), format=_LOG_FORMAT.format(""))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for sentence in unknown_variables(os.environ, GatewaySettings.model_fields):
        _log.warning("%s", sentence)
    if not settings.replicas:
        return _fail("no replica is given: pass --replica http://127.0.0.1:8101 (once for each replica).", EXIT_USAGE)
    if (problem := openness.problem(settings)) is not None:
        return _fail(problem, EXIT_USAGE)
    raise_fd_limit()  # before the application works out how many requests it can afford
    if settings.processes > 1:
        return _run_processes(settings)
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        return _fail(_cannot_listen(settings, error), EXIT_PORT)
    return _serve(settings, listener, None)


def _run_processes(settings: GatewaySettings) -> int:
    count = settings.processes
    if settings.redis_url is None:
        return _fail(
            f"{count} processes share what they know through Redis: set WARMGATE_REDIS_URL, or leave --processes at 1.",
            EXIT_USAGE,
        )
    try:
        sockets = listeners(lambda port, reuse: _listen(settings.host, port, reuse), settings.port, count)
    except OSError as error:
        return _fail(_cannot_listen(settings, error), EXIT_PORT)
    limits = {name: share_of(getattr(settings, name), count) for name in ("max_in_flight", "max_queued")}
    own = settings.model_copy(update=limits)
    return run_processes(sockets, lambda place: _serve(own, place.listener, place))


def _serve(settings: GatewaySettings, listener: socket.socket, place: Place | None) -> int:
    if place is not None:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logging.Formatter(_LOG_FORMAT.format(f" process {place.number}")))
    try:
        app = create_app(settings)
    except UnknownPolicy as error:
        return _fail(f"{error}.", EXIT_USAGE)
    except KeysError as error:
        return _fail(f"{error}.", EXIT_USAGE)
    except TraceFileError as error:
        return _fail(str(error), EXIT_USAGE)
    except OSError as error:
        return _fail(f"the access log {settings.access_log} can't be opened: {error.strerror}.", EXIT_USAGE)
    if place is None or place.number == 0:
        _warn_if_open(app, settings)
    garbage.tame()
    sockets = [listener]
    if place is not None:
        app.siblings = Siblings(place)
        sockets.append(place.own_socket)
    _Server(_uvicorn_config(app, settings), app, place).run(sockets=sockets)
    return 0


class _Server(uvicorn.Server):
    """Tells the application when draining begins. In a `place` among several it drains when their parent is gone."""

    def __init__(self, config: uvicorn.Config, app: Gateway, place: Place | None = None) -> None:
        super().__init__(config)
        self._app = app
        self._place = place
        self._collections = garbage.FullCollections(lambda: app.admission.num_in_flight == 0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._collections.start()
        if self._place is not None:
            asyncio.get_running_loop().add_reader(self._place.parent_fd, self._parent_gone, self._place.parent_fd)
        assert sockets is not None
        host, port = sockets[0].getsockname()[:2]
        count = len(self._app.settings.replicas)
        plural = "" if count == 1 else "s"
        _log.info(
            "gateway on http://%s:%d, policy %s, %d replica%s, %s",
            host, port, self._app.settings.policy, count, plural, compiled.state(),
        )  # fmt: skip

    def _parent_gone(self, parent_fd: int) -> None:
        asyncio.get_running_loop().remove_reader(parent_fd)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, a second one ends at once. Neither is raised again: a clean stop exits with 0."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.draining = True
        self._collections.close()
        until = time.monotonic() + self._app.settings.unready_s
        while time.monotonic() < until and not self.force_exit:  # noqa: ASYNC110  # a signal handler sets it
            await asyncio.sleep(0.1)  # still serving: balancers need time to see that /ready says no
        await super().shutdown(sockets)
        if self.force_exit:
            await self._end_at_once()

    async def _end_at_once(self) -> None:
        """End what is under way as at the end of the drain time. uvicorn leaves that to the loop's end, which knows
        tasks, and not the requests that have none (straight_run.py)."""
        for run in tuple(self.server_state.tasks):
            run.cancel()
        await asyncio.sleep(0)  # by now they go on as tasks
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.lifespan.shutdown()  # the access log has lines to write


def _uvicorn_config(app: Gateway, settings: GatewaySettings) -> uvicorn.Config:
    max_header_bytes = settings.max_header_bytes

    class Protocol(PlainProtocol):
        header_limit = max_header_bytes

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )


def _listen(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """A bound socket. SO_REUSEADDR lets a restart bind at once; it doesn't allow two listeners, which `reuse_port`
    does. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without a bound the kernel lets a slow reader's buffer grow to megabytes, and with a
        # thousand of them it runs out of memory for TCP and drops everybody's packets.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _cannot_listen(settings: GatewaySettings, error: OSError) -> str:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use already: stop what listens there or choose another --port."
    if error.errno == errno.EACCES:
        return f"listening on {where} is not permitted: choose a --port of 1024 or more."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host {settings.host} is not an address of this machine."
    return f"listening on {where} failed: {error.strerror}."


def _warn_if_open(app: Gateway, settings: GatewaySettings) -> None:
    if app.tenancy.is_open:
        reach = "this machine" if openness.is_loopback(settings.host) else f"the network of {settings.host}"
        _log.warning("no API keys are configured: whoever is on %s may use the models behind this gateway", reach)


def _fail(sentence: str, code: int) -> int:
    print(f"warmgate: {sentence}", file=sys.stderr)
    return code


def parse_flags(argv: list[str]) -> tuple[dict[str, Any], str | None]:
    """Flags of `python -m gateway.server`: the settings' names; --replica may be repeated."""
    parser = argparse.ArgumentParser(prog="python -m gateway.server", description="Serve the gateway.")
    parser.add_argument("--config", help="YAML file of settings")
    parser.add_argument("--replica", action="append", dest="replicas", help="URL of a replica (repeat for each)")
    for name in GatewaySettings.model_fields:
        if name not in ("replicas", "secret", "redis_url", "salt_secret"):  # what shows in process lists
            parser.add_argument(f"--{name.replace('_', '-')}", dest=name)
    flags = vars(parser.parse_args(argv))
    return flags, flags.pop("config")


def main(argv: list[str] | None = None) -> int:
    flags, config = parse_flags(sys.argv[1:] if argv is None else argv)
    try:
        settings = load_settings(flags, config)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
