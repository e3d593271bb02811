"""How many requests the gateway has under way at once, and who waits when that is all of them.

Without a bound an overload ends in the kernel's limits: no file descriptors, no memory, every request failing. With one
the surplus waits its turn for a bounded time in a queue of bounded length, first come first served, and what finds the
queue full hears so at once, with a time to come back. What was refused has cost nothing.
"""

from __future__ import annotations

import asyncio
import resource
from collections import deque

from engine_worker.contract.errors import ApiError

RETRY_AFTER_S = 2.0
_FDS_KEPT = 128  # for listening, polls, feeds, logs and files


class Admission:
    """`max_in_flight` requests at once, `max_queued` waiting, each for `queue_s` at most."""

    def __init__(self, max_in_flight: int, max_queued: int, queue_s: float) -> None:
        assert max_in_flight >= 1
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._queue_s = queue_s
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.num_in_flight = 0
        self.is_closed = False  # somebody empties this gateway: nothing new is let in

    @property
    def num_queued(self) -> int:
        return len(self._waiters)

    async def enter(self) -> None:
        """Take a place; `leave` gives it back. Raises ApiError(503). A cancelled wait leaves nothing behind."""
        if self.is_closed:
            message = "This gateway is being drained and takes no new requests."
            raise ApiError(503, message, code="draining", retry_after_s=RETRY_AFTER_S)
        if self.num_in_flight < self._max_in_flight:
            self.num_in_flight += 1
            return
        if len(self._waiters) >= self._max_queued:
            message = f"{self.num_in_flight} requests are under way and {len(self._waiters)} wait: come back later."
            raise ApiError(503, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._queue_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self.leave()  # the place came in the very turn in which the wait ended
            else:
                self._waiters.remove(waiter)
            if isinstance(error, TimeoutError):
                message = f"The request waited {self._queue_s:g} seconds for its turn."
                raise ApiError(503, message, code="queue_timeout", retry_after_s=RETRY_AFTER_S) from None
            raise

    def leave(self) -> None:
        """Hand the place to the next in line, or free it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.num_in_flight -= 1

    def check_invariants(self) -> None:
        assert 0 <= self.num_in_flight <= self._max_in_flight
        assert len(self._waiters) <= self._max_queued
        assert not self._waiters or self.num_in_flight == self._max_in_flight


def affordable_in_flight() -> int:
    """As many requests as file descriptors allow, at two each (the client's and the replica's)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 2**20
    return max(16, (soft - _FDS_KEPT) // 2)


def raise_fd_limit() -> None:
    """Use what the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
