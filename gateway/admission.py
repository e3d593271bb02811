"""How many requests are under way at once, and who waits when that is all of them.

Without a bound an overload ends in the kernel's limits: no file descriptors, no memory, every request failing. With one
the surplus waits its turn for a bounded time in a queue of bounded length, and what finds the queue full hears so at
once, with a time to come back. What was refused has cost nothing.

Two bounds: `max_in_flight` for the gateway, and for each model what its replicas have room for (`room`). Behind the
second the engines' own queues stay short, so the order is decided here: between tenants by the service that each got
(policies/fair.py), within a tenant first come first served. A queue that is full takes a newcomer in place of the last
of the longest line, so that one tenant's flood can't shut the door to the others.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Final

from engine_worker.contract.errors import ApiError
from policies.fair import FairQueue

RETRY_AFTER_S: Final = 2.0
_FDS_KEPT: Final = 128  # for listening, polls, feeds, logs and files


class Claim:
    """Whose request it is, for which model, and the service that it is expected to take, in tokens."""

    __slots__ = ("cost", "model", "tenant", "weight")

    def __init__(self, tenant: str = "", weight: float = 1.0, model: str = "", cost: float = 0.0) -> None:
        self.tenant: Final = tenant
        self.weight: Final = weight
        self.model: Final = model
        self.cost: Final = cost


ANYONE = Claim()
_Waiter = asyncio.Future[None]


class _Lane:
    """One model's requests."""

    __slots__ = ("num_in_flight", "queue")

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.queue: FairQueue[_Waiter] = FairQueue()


class Admission:
    """`max_in_flight` requests at once, `max_queued` waiting, each for `queue_s` at most.

    `room` tells how many requests for a model its replicas have room for now; 0: no bound.
    """

    def __init__(
        self, max_in_flight: int, max_queued: int, queue_s: float, room: Callable[[str], int] | None = None
    ) -> None:
        assert max_in_flight >= 1
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._queue_s = queue_s
        self._room = room
        self._lanes: dict[str, _Lane] = {"": _Lane()}
        self.num_in_flight = 0
        self.num_queued = 0
        self._wasted: set[_Waiter] = set()  # whose turn came when they had left, and didn't know yet
        self.is_closed = False  # somebody empties this gateway: nothing new is let in

    async def enter(self, claim: Claim = ANYONE) -> None:
        """Take a place; `leave` gives it back. Raises ApiError(503). A cancelled wait leaves nothing behind."""
        if self.try_enter(claim):
            return
        lane = self._lane(claim)
        if self.num_queued >= self._max_queued:
            self._make_room(claim, lane)
        await self._wait(claim, lane)

    def try_enter(self, claim: Claim = ANYONE) -> bool:
        """The same where there is nothing to wait for, else False. Raises ApiError(503)."""
        if self.is_closed:
            message = "This gateway is being drained and takes no new requests."
            raise ApiError(503, message, code="draining", retry_after_s=RETRY_AFTER_S)
        lane = self._lane(claim)
        if lane.queue or not self._has_room(claim.model, lane):
            return False
        self._admit(lane)
        lane.queue.begin(claim.tenant, claim.weight, claim.cost)
        return True

    async def _wait(self, claim: Claim, lane: _Lane) -> None:
        waiter = asyncio.get_running_loop().create_future()
        lane.queue.arrive(claim.tenant, claim.weight, waiter, claim.cost)
        self.num_queued += 1
        try:
            async with asyncio.timeout(self._queue_s):
                await waiter
        except BaseException as error:
            if not waiter.done() or waiter.cancelled():
                if waiter in self._wasted:
                    self._wasted.remove(waiter)
                    lane.queue.end(claim.tenant, claim.cost, 0.0)
                else:
                    self.num_queued -= lane.queue.cancel(claim.tenant, waiter)
                self._tidy(claim.model, lane)
            elif waiter.exception() is None:
                self.leave(claim)  # the place came in the very turn in which the wait ended
            if isinstance(error, TimeoutError):
                message = f"The request waited {self._queue_s:g} seconds for its turn."
                raise ApiError(503, message, code="queue_timeout", retry_after_s=RETRY_AFTER_S) from None
            raise

    def leave(self, claim: Claim = ANYONE, service: float = 0.0) -> None:
        """Free the place for the next in line. `service`: what the request took, in tokens."""
        lane = self._lane(claim)
        lane.num_in_flight -= 1
        self.num_in_flight -= 1
        lane.queue.end(claim.tenant, claim.cost, service)
        if self.num_queued:
            self.pump()
        self._tidy(claim.model, lane)

    def pump(self) -> None:
        """Let those go for whom there is room. The models take turns at the gateway's own places: a line for one keeps
        nobody from another."""
        has_gone = bool(self.num_queued)
        while has_gone:
            has_gone = False
            for model in list(self._lanes):
                if self.num_in_flight >= self._max_in_flight:
                    return
                lane = self._lanes[model]
                if lane.queue and self._has_room(model, lane):
                    self._lanes[model] = self._lanes.pop(model)  # to the end
                    self._let_go(lane)
                    has_gone = True

    def _let_go(self, lane: _Lane) -> None:
        waiter = lane.queue.take()
        assert waiter is not None
        self.num_queued -= 1
        assert not waiter.done() or waiter.cancelled()
        if waiter.done():
            self._wasted.add(waiter)
        else:
            self._admit(lane)
            waiter.set_result(None)

    def _admit(self, lane: _Lane) -> None:
        lane.num_in_flight += 1
        self.num_in_flight += 1

    def _lane(self, claim: Claim) -> _Lane:
        lane = self._lanes.get(claim.model)
        if lane is None:
            lane = self._lanes[claim.model] = _Lane()
        return lane

    def _tidy(self, model: str, lane: _Lane) -> None:
        """Clients choose models' names: what nobody uses is forgotten, unless it is served."""
        if model and not lane.num_in_flight and not lane.queue and (self._room is None or not self._room(model)):
            self._lanes.pop(model, None)

    def _has_room(self, model: str, lane: _Lane) -> bool:
        if self.num_in_flight >= self._max_in_flight:
            return False
        if self._room is None or not lane.num_in_flight:
            return True
        room = self._room(model)
        return not room or lane.num_in_flight < room

    def _make_room(self, claim: Claim, lane: _Lane) -> None:
        """In the lane of the same model, or else in another."""
        lanes = (lane, *(other for other in self._lanes.values() if other is not lane))
        crowded_out = next(filter(None, (each.queue.crowd_out(claim.tenant) for each in lanes)), None)
        if crowded_out is None:
            self._tidy(claim.model, lane)
            raise self._full()
        self.num_queued -= 1
        if not crowded_out.done():
            crowded_out.set_exception(self._full())

    def _full(self) -> ApiError:
        message = f"{self.num_in_flight} requests are under way and {self.num_queued} wait: come back later."
        return ApiError(503, message, code="queue_full", retry_after_s=RETRY_AFTER_S)

    def check_invariants(self) -> None:
        assert 0 <= self.num_in_flight <= self._max_in_flight
        assert self.num_in_flight == sum(lane.num_in_flight for lane in self._lanes.values())
        assert self.num_queued == sum(len(lane.queue) for lane in self._lanes.values())
        assert self.num_queued <= self._max_queued
        num_served = sum(lane.queue.num_served for lane in self._lanes.values())
        assert num_served == self.num_in_flight + len(self._wasted), "whoever was charged is under way"
        for model, lane in self._lanes.items():
            lane.queue.check_invariants()
            assert not lane.queue or not self._has_room(model, lane) or self._room is not None


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
