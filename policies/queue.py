"""Requests that wait in the gateway: a machine without a clock.

Theory. `arrive` puts a request in, `poll` says which may be dispatched now and which waited too long; the driver polls
on arrivals, first tokens, finishes and at `next_deadline`. What may go is the *hold*'s business: without one everything
goes at once, in the order of arrival. A hold sees one request at a time, in order of rank (priority first, lower is
sooner, then whatever the hold ranks by, then arrival), and answers against the fleet as it is after the ones before it
were dispatched: so `poll` hands out one batch of requests that it allowed *together* only if the driver places each
before the next question. That is why poll takes a callback: it is asked and told, request by request.

A request that the hold refuses doesn't block those behind it (they may be bound for other replicas). A hold that knows
before any question that nobody may go says so in `begin`, if it has that method.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, runtime_checkable

from policies.types import RouteRequest


class Hold(Protocol):
    """A rule that keeps requests in the queue."""

    def rank(self, request: RouteRequest, arrived_at: float, now: float) -> float:
        """Among equal priorities, lower goes first. Asked once, when the request arrives."""
        ...

    def admits(self, request: RouteRequest, now: float) -> bool:
        """Whether the request may be dispatched now."""
        ...


@runtime_checkable
class Beginning(Protocol):
    """What a hold may have besides."""

    def begin(self, now: float) -> bool:
        """A poll begins. False: nobody may go, so nobody need be asked."""
        ...


class QueueFull(Exception):
    """The queue holds as many requests as it may. Answer 503 or 429 with Retry-After."""


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """One request in the queue, in the order of going; `deadline` is when it gives up (inf: never)."""

    priority: int
    rank: float
    number: int
    request: RouteRequest = field(compare=False)
    deadline: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Polled:
    """What left the queue: `ready` in the order of dispatch, `expired` past their deadline."""

    ready: tuple[RouteRequest, ...]
    expired: tuple[RouteRequest, ...]


class RequestQueue:
    """See the module's header. `max_waiting` bounds the queue (arrive raises QueueFull beyond it)."""

    def __init__(self, hold: Hold | None = None, max_waiting: int = 100_000) -> None:
        self._hold = hold
        self._max_waiting = max_waiting
        self._waiting: dict[str, Waiting] = {}
        self._order: list[Waiting] = []  # by rank; those that left are dropped at the next poll
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def arrive(self, request: RouteRequest, now: float, deadline: float = inf) -> None:
        """Put a request in. Raises QueueFull; a request that is in already is a bug of the driver."""
        assert request.request_id not in self._waiting, "the request waits already"
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already; try again later")
        self._arrivals += 1
        rank = self._hold.rank(request, now, now) if self._hold is not None else 0.0
        waiting = Waiting(request.priority, rank, self._arrivals, request, deadline)
        self._waiting[request.request_id] = waiting
        insort(self._order, waiting)

    def cancel(self, request_id: str) -> bool:
        """The client is gone. False when the request doesn't wait (any more)."""
        return self._waiting.pop(request_id, None) is not None

    def poll(self, now: float, dispatch: Callable[[RouteRequest], None] | None = None) -> Polled:
        """Take out what may go and what is too late. `dispatch` is called for each ready request before the hold is
        asked about the next, so that the hold sees a fleet that has it."""
        expired = tuple(w.request for w in self._waiting.values() if w.deadline <= now)
        for request in expired:
            del self._waiting[request.request_id]
        self._order = [waiting for waiting in self._order if self._is_in(waiting)]
        if isinstance(self._hold, Beginning) and not self._hold.begin(now):
            return Polled((), expired)
        ready = []
        for waiting in tuple(self._order):
            request = waiting.request
            if self._is_in(waiting) and (self._hold is None or self._hold.admits(request, now)):
                del self._waiting[request.request_id]
                ready.append(request)
                if dispatch is not None:
                    dispatch(request)
        return Polled(tuple(ready), expired)

    def next_deadline(self) -> float | None:
        """When to poll again at the latest; None when nothing that waits has a deadline."""
        earliest = min((w.deadline for w in self._waiting.values()), default=inf)
        return None if earliest == inf else earliest

    def _is_in(self, waiting: Waiting) -> bool:
        return self._waiting.get(waiting.request.request_id) is waiting

    def check_invariants(self) -> None:
        assert len(self._waiting) <= self._max_waiting
        numbers = [waiting.number for waiting in self._waiting.values()]
        assert numbers == sorted(set(numbers)), "arrival numbers in order, each once"
        assert all(rid == waiting.request.request_id for rid, waiting in self._waiting.items())
        assert self._arrivals >= (numbers[-1] if numbers else 0)
        assert self._order == sorted(self._order)
        assert [w for w in self._order if self._is_in(w)] == sorted(self._waiting.values())
