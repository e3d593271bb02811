"""Who sends what when: an open loop that keeps to its clock, or a closed loop of users who wait for their answers.

Open loop. A timed trace is replayed in its order, every request at a random moment inside its tick, and the whole
stretched or shrunk to the wanted rate. A trace of sessions has no common clock: sessions begin as a Poisson process
whose rate makes the requests come at the wanted rate on average, and inside a session a request follows its
predecessor's answer after its think time.

Closed loop. Each user plays one session after the other, in an order shuffled by the seed. When no session is left to
begin, nobody sends anything any more: a tail of few users would be another, lighter load. (A timed trace's request
that belongs to no session is a session of its own.)
"""

from __future__ import annotations

import random
from collections.abc import Callable

from loadtest.sim.clock import Clock
from loadtest.sim.setup import Load
from loadtest.sim.trace import Trace, TraceRequest


def jittered(trace: Trace, rng: random.Random) -> list[tuple[float, TraceRequest]]:
    """A timed trace's requests with their moments from the start, in order. A session's never overtake each other."""
    start = min(session[0].at_s for session in trace.sessions)
    arrivals: list[tuple[float, TraceRequest]] = []
    for session in trace.sessions:
        moments = sorted(request.at_s - start + request.tick_s * rng.random() for request in session)
        arrivals += zip(moments, session, strict=True)
    return sorted(arrivals, key=lambda arrival: arrival[0])


class Workload:
    """Calls `send(request, user)` when a request is due. Tell it of answers by `answered`."""

    def __init__(
        self, clock: Clock, trace: Trace, load: Load, rng: random.Random, send: Callable[[TraceRequest, int], None]
    ) -> None:
        self._clock = clock
        self._load = load
        self._send_on = send
        self._sessions: dict[int, tuple[TraceRequest, ...]] = {}
        self._places: dict[int, int] = {}
        self.is_over = False
        if load.users:
            self._closed_loop(trace, rng)
        elif trace.timed:
            self._timed(trace, rng)
        else:
            self._sessions_by_chance(trace, rng)

    def answered(self, user: int) -> None:
        """A request of `user` got its answer, or an error. The user goes on."""
        if user >= 0:
            self._places[user] += 1
            self._next(user)

    # Open loop

    def _timed(self, trace: Trace, rng: random.Random) -> None:
        arrivals = jittered(trace, rng)
        natural = len(arrivals) / max(arrivals[-1][0] - arrivals[0][0], 1e-9)
        scale = natural / self._load.rate if self._load.rate else 1.0
        for moment, request in arrivals:
            self._clock.at(moment * scale, self._send, request, -1)

    def _sessions_by_chance(self, trace: Trace, rng: random.Random) -> None:
        order = list(trace.sessions)
        rng.shuffle(order)
        rate = (self._load.rate or 1.0) * len(order) / trace.num_requests
        self._waiting: list[tuple[TraceRequest, ...]] = []
        moment = 0.0
        for user, session in enumerate(order):
            moment += rng.expovariate(rate)
            self._sessions[user], self._places[user] = session, 0
            self._clock.at(moment, self._send, session[0], user)

    # Closed loop

    def _closed_loop(self, trace: Trace, rng: random.Random) -> None:
        self._waiting = list(trace.sessions)
        if trace.timed:
            self._waiting.reverse()  # in the trace's order
        else:
            rng.shuffle(self._waiting)
        for user in range(self._load.users):
            self._clock.at(rng.uniform(0.0, self._load.ramp_s), self._begin, user)

    def _begin(self, user: int) -> None:
        if not self._waiting:
            self.is_over = True
            return
        self._sessions[user], self._places[user] = self._waiting.pop(), 0
        self._send(self._sessions[user][0], user)

    def _next(self, user: int) -> None:
        session, place = self._sessions[user], self._places[user]
        if place < len(session):
            think_s = min(session[place].think_s * self._load.think_scale, self._load.max_think_s)
            self._clock.at(self._clock.now + think_s, self._send, session[place], user)
        elif self._load.users:
            first = self._waiting[-1][0].think_s if self._waiting else 0.0
            think_s = min(first * self._load.think_scale, self._load.max_think_s)
            self._clock.at(self._clock.now + think_s, self._begin, user)

    def _send(self, request: TraceRequest, user: int) -> None:
        if self._load.duration_s is not None and self._clock.now > self._load.duration_s:
            self.is_over = True
        if not self.is_over:
            self._send_on(request, user)
