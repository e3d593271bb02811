"""Connections to one replica: kept while they are young, capped in number, handed on in turn."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from gateway.upstream_connection import Connection
from gateway.upstream_types import Phase, UpstreamError, UpstreamFailure, reason_of

# Under the 5 seconds after which uvicorn, and so most engines, close an idle connection.
_KEEP_ALIVE_S: Final = 4.0


@dataclass(slots=True, eq=False)
class Pool:
    """One origin's connections, at most `max_connections`. Who finds none free waits its turn.

    num_open   connections made or being made, as counted against the limit
    idle       free to use, the one used last at the end
    """

    host: str
    port: int
    context: ssl.SSLContext | None
    max_connections: int
    connect_s: float
    num_open: int = 0
    idle: list[Connection] = field(default_factory=list)
    busy: set[Connection] = field(default_factory=set)
    waiters: deque[asyncio.Future[Connection | None]] = field(default_factory=deque)
    sweep: asyncio.TimerHandle | None = None

    def reusable(self) -> Connection | None:
        """An idle connection, if there is one worth a try. It is `busy` from now on."""
        oldest = time.monotonic() - _KEEP_ALIVE_S
        while self.idle:
            connection = self.idle.pop()
            self.busy.add(connection)
            if connection.idle_since >= oldest and not connection.is_closing:
                return connection
            connection.close()
        return None

    async def take(self) -> Connection:
        """A free connection or a new one. Raises UpstreamError(CONNECT)."""
        connection = self.reusable()
        if connection is not None:
            return connection
        if self.num_open >= self.max_connections:
            connection = await self._turn()
            if connection is not None:
                return connection
        else:
            self.num_open += 1
        return await self._connect()

    async def fresh(self) -> Connection:
        """A new connection, above the limit if need be: it takes the place of one that has just failed."""
        self.num_open += 1
        return await self._connect()

    async def _turn(self) -> Connection | None:
        """Wait for a connection that is given back, or for the right to make one (None; counted already)."""
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                connection = waiter.result()
                if connection is None:
                    self._left()
                else:
                    self.put_back(connection)
            raise

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await loop.create_connection(  # type: ignore[type-var]
                    lambda: Connection(self._lost), self.host, self.port, ssl=self.context
                )
        except BaseException as error:
            self._left()
            if isinstance(error, TimeoutError) and not error.errno:
                raise UpstreamError(UpstreamFailure.CONNECT, "no connection to the replica (timed out)") from error
            if isinstance(error, OSError | ValueError):  # ValueError: certificates, names that are none
                message = f"no connection to the replica ({reason_of(error)})"
                raise UpstreamError(UpstreamFailure.CONNECT, message) from error
            raise
        self.busy.add(connection)
        return connection

    def put_back(self, connection: Connection) -> None:
        """`connection` is free again."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        connection.idle_since = time.monotonic()
        self.busy.discard(connection)
        self.idle.append(connection)
        if self.sweep is None:
            self.sweep = asyncio.get_running_loop().call_later(_KEEP_ALIVE_S, self._sweep)

    def _lost(self, connection: Connection) -> None:
        if connection in self.busy:
            self.busy.remove(connection)
        elif connection in self.idle:
            self.idle.remove(connection)
        else:
            return  # it never came to be used: counted where it was made
        self._left()

    def _left(self) -> None:
        """There is room for one connection more."""
        while self.waiters and self.num_open <= self.max_connections:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.num_open -= 1

    def _sweep(self) -> None:
        self.sweep = None
        oldest = time.monotonic() - _KEEP_ALIVE_S
        for connection in self.idle:
            if connection.idle_since < oldest:
                connection.close()
        if self.idle:
            self.sweep = asyncio.get_running_loop().call_later(_KEEP_ALIVE_S, self._sweep)

    def close(self) -> None:
        if self.sweep is not None:
            self.sweep.cancel()
        for waiter in self.waiters:
            waiter.cancel()
        for connection in (*self.idle, *self.busy):
            connection.close()

    def check_invariants(self) -> None:
        assert self.num_open >= len(self.idle) + len(self.busy)
        assert not (self.busy & set(self.idle))
        assert all(connection.phase in (Phase.IDLE, Phase.CLOSED) for connection in self.idle)
        for connection in self.idle:
            connection.check_invariants()
        assert not self.waiters or self.num_open >= self.max_connections
