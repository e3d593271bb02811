"""One task, many reasons to stop it: the right one arrives, once, wherever the task waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.guard import TICK_S, Guard, Interrupt, Wheel


async def guarded(wait, deadline_s=30.0, prepare=lambda guard: None):
    """The reason for which `wait` was interrupted, or what it returned."""
    guard = Guard(deadline_s)
    prepare(guard)
    try:
        return await wait
    except asyncio.CancelledError as error:
        return guard.translate(error).reason
    finally:
        guard.close()
        assert asyncio.current_task().cancelling() == 0 or guard.reason is None


async def test_the_deadline_interrupts():
    assert await guarded(asyncio.Event().wait(), deadline_s=0.01) is Interrupt.DEADLINE


async def test_a_phase_interrupts_with_its_own_name_before_the_deadline():
    def prepare(guard):
        guard.enter(Interrupt.FIRST_TOKEN_TIMEOUT, 0.01)

    assert await guarded(asyncio.Event().wait(), prepare=prepare) is Interrupt.FIRST_TOKEN_TIMEOUT


async def test_a_phase_that_was_left_does_not_interrupt():
    def prepare(guard):
        guard.enter(Interrupt.FIRST_TOKEN_TIMEOUT, 0.01)
        guard.leave()

    assert await guarded(asyncio.Event().wait(), deadline_s=0.1, prepare=prepare) is Interrupt.DEADLINE


async def test_an_extended_phase_ends_later_and_under_its_new_name():
    loop = asyncio.get_running_loop()

    def prepare(guard):
        guard.enter(Interrupt.STREAM_IDLE, 0.01)
        guard.extend(Interrupt.CLIENT_STALLED, loop.time() + 0.05)

    assert await guarded(asyncio.Event().wait(), prepare=prepare) is Interrupt.CLIENT_STALLED


async def test_a_shorter_phase_after_a_longer_one_still_fires():
    def prepare(guard):
        guard.enter(Interrupt.STREAM_IDLE, 20.0)
        guard.enter(Interrupt.FIRST_TOKEN_TIMEOUT, 0.01)

    assert await guarded(asyncio.Event().wait(), prepare=prepare) is Interrupt.FIRST_TOKEN_TIMEOUT


async def test_the_first_reason_stands():
    def prepare(guard):
        loop = asyncio.get_running_loop()
        loop.call_soon(guard.interrupt, Interrupt.CLIENT_GONE)
        loop.call_soon(guard.interrupt, Interrupt.REPLICA_STUCK)

    assert await guarded(asyncio.Event().wait(), prepare=prepare) is Interrupt.CLIENT_GONE


async def test_the_task_can_go_on_waiting_after_an_interrupt():
    guard = Guard(30.0)
    guard.enter(Interrupt.FIRST_TOKEN_TIMEOUT, 0.01)
    with pytest.raises(asyncio.CancelledError) as caught:
        await asyncio.Event().wait()
    assert guard.translate(caught.value).reason is Interrupt.FIRST_TOKEN_TIMEOUT
    await asyncio.sleep(0)
    guard.enter(Interrupt.STREAM_IDLE, 0.01)
    with pytest.raises(asyncio.CancelledError) as caught:
        await asyncio.Event().wait()
    assert guard.translate(caught.value).reason is Interrupt.STREAM_IDLE
    guard.close()
    assert asyncio.current_task().cancelling() == 0


async def test_a_closed_guard_never_interrupts():
    guard = Guard(0.01)
    guard.close()
    guard.interrupt(Interrupt.CLIENT_GONE)
    await asyncio.sleep(0.03)
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_outside_is_a_shutdown():
    task = asyncio.create_task(guarded(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task is Interrupt.SHUTDOWN


async def test_a_wait_that_ends_in_the_same_turn_as_the_interrupt_is_interrupted():
    """The result of the wait is lost, which is why what holds a resource must expect it (lease, response)."""
    future = asyncio.get_running_loop().create_future()

    def prepare(guard):
        def both():
            future.set_result("done")
            guard.interrupt(Interrupt.CLIENT_GONE)

        asyncio.get_running_loop().call_soon(both)

    async def wait():
        return await future

    assert await guarded(wait(), prepare=prepare) is Interrupt.CLIENT_GONE


class Clock:
    """An event loop's clock and its timers, turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Clock:
        self.timer = (when, callback)
        return self

    def cancel(self) -> None:
        self.timer = None

    def turn_until(self, end: float) -> None:
        while self.timer is not None and self.timer[0] <= end:
            (self.now, callback), self.timer = self.timer, None
            callback()
        self.now = end


class Watcher:
    """Looks when its time has come, as a request with a deadline does."""

    def __init__(self, wheel: Wheel, at: float) -> None:
        self.wheel, self.at = wheel, at
        self.looked_at: float | None = None
        self.tick = wheel.add(self, at)

    def look(self, now: float) -> None:
        if now >= self.at:
            self.looked_at = now
        else:
            self.tick = self.wheel.add(self, self.at)


def test_places_far_ahead_stay_few_however_many_requests_close_before():
    clock = Clock()
    wheel = Wheel(clock)  # type: ignore[arg-type]
    for _ in range(10_000):
        watcher = Watcher(wheel, clock.now + 1800)
        wheel.remove(watcher, watcher.tick)
        clock.turn_until(clock.now + TICK_S)
        wheel.check_invariants()
    assert len(wheel._ticks) <= 10_000 / 64 + 2


@given(st.lists(st.floats(0, 4000), min_size=1, max_size=30))
def test_near_or_far_each_is_looked_at_within_a_tick_of_its_time(waits: list[float]):
    clock = Clock()
    wheel = Wheel(clock)  # type: ignore[arg-type]
    watchers = [Watcher(wheel, clock.now + wait) for wait in waits]
    clock.turn_until(clock.now + 4001)
    for watcher in watchers:
        assert watcher.looked_at is not None
        assert 0 <= watcher.looked_at - watcher.at <= TICK_S * 1.01
    wheel.check_invariants()
