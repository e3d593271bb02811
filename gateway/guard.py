"""Reasons to stop a request, made one: a task's guard interrupts it wherever it waits, and says why.

A request waits in many places: for a place, a connection, a first token, the next chunk, a client that reads slowly.
Any of these waits may have to end early: the client left, the phase took too long, the deadline passed, the replica is
gone. The guard cancels the task once, with a reason, and the task turns the CancelledError back into `Interrupted`
with `guard.translate`. A cancellation with no reason of the guard's comes from outside (a forced shutdown).

Timers of their own would be a tenth of what a request costs, and nearly all are cancelled. So all guards of a loop
share a wheel: time in ticks, for each tick the guards that want to be looked at then, and one real timer for the next
tick in use. Moving a deadline later (each chunk of a stream does) is one attribute write; the guard finds out when it
is looked at, and takes a place further on. Interrupts arrive only from callbacks, so never while the task itself runs:
after `close()` in the task none can come.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from enum import StrEnum
from typing import Final, Protocol
from weakref import WeakKeyDictionary


class Interrupt(StrEnum):
    BODY_TIMEOUT = "body_timeout"
    CLIENT_GONE = "client_gone"
    REPLICA_STUCK = "replica_stuck"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    STREAM_IDLE = "stream_idle"
    CLIENT_STALLED = "client_stalled"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class Interrupted(Exception):
    def __init__(self, reason: Interrupt) -> None:
        super().__init__(reason.value)
        self.reason = reason


TICK_S: Final = 0.02
FAR_TICKS: Final = 512  # some ten seconds
FAR_MASK: Final = ~63


class Looked(Protocol):
    """What has a place on the wheel."""

    def look(self, now: float) -> None:
        """Its time has come, or it takes its place anew."""
        ...


class Interruptible(Protocol):
    """What can be stopped while it waits: a guard, or a run on the straight way."""

    def interrupt(self, reason: Interrupt) -> None: ...


class Wheel:
    """Guards by the tick at which they want to be looked at. Ticks left empty by closed guards pass unnoticed.

    Far ahead, 64 ticks share one place, that of the first: a guard is looked at there and takes its own. Nearly all
    close before; with a place for each tick, requests that may take half an hour would keep 90,000 empty sets.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ticks: dict[int, set[Looked]] = {}
        self._order: list[int] = []  # a heap of the ticks in use
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0

    def add(self, guard: Looked, at: float) -> int:
        """Look at `guard` when `at` has come, or before, to be added again. Returns its place, for `remove`."""
        tick = int(at / TICK_S) + 1
        if tick - int(self._loop.time() / TICK_S) > FAR_TICKS:
            tick &= FAR_MASK
        guards = self._ticks.get(tick)
        if guards is None:
            guards = self._ticks[tick] = set()
            heapq.heappush(self._order, tick)
            if self._timer is None or tick < self._timer_tick:
                self._arm()
        guards.add(guard)
        return tick

    def remove(self, guard: Looked, tick: int) -> None:
        if (guards := self._ticks.get(tick)) is not None:
            guards.discard(guard)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_tick = self._order[0]
        self._timer = self._loop.call_at(self._timer_tick * TICK_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._order and self._order[0] * TICK_S <= now:
            for guard in self._ticks.pop(heapq.heappop(self._order)):
                guard.look(now)
        while self._order and not self._ticks[self._order[0]]:
            del self._ticks[heapq.heappop(self._order)]
        if self._order:
            self._arm()

    def check_invariants(self) -> None:
        assert sorted(self._order) == sorted(self._ticks)
        assert (self._timer is None) == (not self._order)
        assert self._timer is None or self._timer_tick <= self._order[0]


_wheels: WeakKeyDictionary[asyncio.AbstractEventLoop, Wheel] = WeakKeyDictionary()


def wheel_of(loop: asyncio.AbstractEventLoop) -> Wheel:
    wheel = _wheels.get(loop)
    if wheel is None:
        wheel = _wheels[loop] = Wheel(loop)
    return wheel


class Guard:
    """Guards the current task until `close()`. `deadline_s` bounds the whole request, `phase` its first phase."""

    __slots__ = (
        "_deadline_at",
        "_last_at",
        "_loop",
        "_open",
        "_phase",
        "_phase_at",
        "_reason",
        "_task",
        "_tick",
        "_tick_at",
        "_wheel",
    )

    def __init__(self, deadline_s: float, phase: Interrupt | None = None, phase_s: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._reason: Interrupt | None = None
        self._open = True
        now = self._loop.time()
        self._last_at = self._deadline_at = now + deadline_s
        self._phase = phase
        self._phase_at = now + phase_s
        self._wheel = wheel_of(self._loop)
        self._tick_at = self._next_at()
        self._tick = self._wheel.add(self, self._tick_at)

    def enter(self, on_timeout: Interrupt, seconds: float) -> None:
        """A phase begins that may last `seconds`; it replaces the one before."""
        self._phase = on_timeout
        self._phase_at = self._loop.time() + seconds
        if self._phase_at < self._tick_at:
            self._arm()

    def leave(self) -> None:
        """No phase: only the deadline counts."""
        self._phase = None

    def extend(self, on_timeout: Interrupt, until: float) -> None:
        """Move the running phase's end later, to `until` on the monotonic clock, and rename its timeout. Cheap."""
        self._phase = on_timeout
        self._phase_at = until

    def hurry(self, seconds: float) -> None:
        """Bring the deadline forward to `seconds` from now, until `relax`."""
        self._deadline_at = min(self._last_at, self._loop.time() + seconds)
        if self._deadline_at < self._tick_at:
            self._arm()

    def relax(self) -> None:
        """The deadline is again the one that the guard began with."""
        self._deadline_at = self._last_at

    @property
    def remaining_s(self) -> float:
        return self._deadline_at - self._loop.time()

    @property
    def reason(self) -> Interrupt | None:
        return self._reason

    def interrupt(self, reason: Interrupt) -> None:
        """Called from a callback: stop the task where it waits. The first reason stands."""
        if self._open and self._reason is None:
            self._reason = reason
            self._task.cancel()

    def translate(self, error: asyncio.CancelledError) -> Interrupted:
        """What a CancelledError meant. Call once for each one caught."""
        if self._reason is None:
            return Interrupted(Interrupt.SHUTDOWN)
        self._task.uncancel()
        reason, self._reason = self._reason, None
        return Interrupted(reason)

    def close(self) -> None:
        self._open = False
        self._wheel.remove(self, self._tick)

    def _arm(self) -> None:
        self._wheel.remove(self, self._tick)
        self._tick_at = self._next_at()
        self._tick = self._wheel.add(self, self._tick_at)

    def _next_at(self) -> float:
        return self._deadline_at if self._phase is None else min(self._deadline_at, self._phase_at)

    def look(self, now: float) -> None:
        """The wheel has come to this guard's place."""
        if not self._open:
            return
        if now >= self._deadline_at:
            # Once: what is still to do (telling the client) has phases of its own.
            self._deadline_at = self._last_at = self._tick_at = math.inf
            self.interrupt(Interrupt.DEADLINE)
        elif self._phase is not None and now >= self._phase_at:
            self.interrupt(self._phase)
            self._phase = None
            self._arm()
        else:
            self._arm()
