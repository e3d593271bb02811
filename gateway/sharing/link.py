"""One client of Redis that can't hurt: every call ends within its time, and a breaker keeps from asking in vain.

A call that fails, or that is cancelled, leaves its connection in the middle of an answer; the connection is dropped, so
the next call can't read it. That also follows a failover: READONLY and LOADING come from a server that is no (longer,
yet) master, and the next connection asks the name anew.

After a failure the breaker is open for `BREAKER_S`, doubling up to `MAX_BREAKER_S`; then one call is the trial.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.sharing.errors import LinkDown as LinkDown

CALL_S = 0.05
CONNECT_S = 1.0
BREAKER_S = 0.25
MAX_BREAKER_S = 4.0

_T = TypeVar("_T")


class Link:
    """Raises ValueError when `url` is no Redis URL. One call at a time."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        pool = ConnectionPool.from_url(
            url, socket_connect_timeout=CONNECT_S, socket_timeout=None, retry=Retry(NoBackoff(), 0), protocol=2,
            max_connections=2,
        )  # fmt: skip
        self._redis: Redis = Redis(connection_pool=pool)
        self._clock = clock
        self._connected = False
        self._has_answered = False
        self._num_failures = 0
        self._closed_until = 0.0
        self.why_down = "not reached yet"
        self.num_failed_calls = 0

    @property
    def is_up(self) -> bool:
        return self._connected

    @property
    def retry_in_s(self) -> float:
        """Until the breaker lets a call through."""
        return max(self._closed_until - self._clock(), 0.0)

    async def call(self, command: Callable[[Redis], Awaitable[_T]], timeout_s: float | None = None) -> _T:
        """`command` on the client, within `timeout_s` or CALL_S (and a second more to connect).
        The first has a second, too: a process that starts on a busy machine is late itself. Raises LinkDown."""
        if self.retry_in_s > 0.0:
            raise LinkDown(self.why_down)
        try:
            if not self._connected:
                async with asyncio.timeout(CONNECT_S):
                    await self._redis.ping()
            limit_s = CALL_S if timeout_s is None else timeout_s
            async with asyncio.timeout(limit_s if self._has_answered else max(limit_s, CONNECT_S)):
                result = await command(self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            await self._failed(error)
            raise LinkDown(self.why_down) from error
        except BaseException:
            await self._drop()
            raise
        self._connected = self._has_answered = True
        self._num_failures = 0
        return result

    async def _failed(self, error: Exception) -> None:
        self.num_failed_calls += 1
        self._connected = False
        self.why_down = _sentence(error)
        self._closed_until = self._clock() + min(BREAKER_S * 2**self._num_failures, MAX_BREAKER_S)
        self._num_failures = min(self._num_failures + 1, 10)
        await self._drop()

    async def _drop(self) -> None:
        self._connected = False
        await self._redis.connection_pool.disconnect(inuse_connections=True)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect(inuse_connections=True)

    async def raw(self, *words: Any, timeout_s: float | None = None) -> Any:
        """A command by its words."""
        return await self.call(lambda redis: redis.execute_command(*words), timeout_s)  # type: ignore[no-untyped-call]


def _sentence(error: Exception) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "Redis does not answer in time"
    text = str(error).strip().rstrip(".") or type(error).__name__
    return f"Redis can't be used: {text[:200]}"
