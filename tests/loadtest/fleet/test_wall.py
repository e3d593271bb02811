"""The wall's clock: the simulator's order, at the wall's moments."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.fleet.wall import WallClock, lag_row


async def test_events_run_in_order_of_their_moments_and_see_them() -> None:
    clock, seen, done = WallClock(1000.0), [], asyncio.Event()

    def note(name: str) -> None:
        seen.append((name, clock.now))
        if name == "b":
            clock.at(clock.now + 1.0, note, "c")
        if name == "d":
            done.set()

    clock.at(30.0, note, "d")
    clock.at(10.0, note, "a")
    clock.at(10.0, note, "b")
    await done.wait()
    assert seen == [("a", 10.0), ("b", 10.0), ("c", 11.0), ("d", 30.0)]
    assert len(clock.lags_s) == 4
    assert min(clock.lags_s) >= 0.0, "nothing runs before its moment"
    clock.close()


async def test_a_blocked_process_delays_what_is_said_but_not_the_account() -> None:
    clock, seen = WallClock(1000.0), []

    def step(number: int) -> None:
        seen.append(clock.now)
        if number < 3:
            clock.at(clock.now + 2.0, step, number + 1)

    clock.at(1.0, step, 0)
    time.sleep(0.02)  # noqa: ASYNC251  # the process is busy elsewhere for 20 seconds of the trace
    now = clock.sync()
    assert seen == [1.0, 3.0, 5.0, 7.0]
    assert now >= 20.0
    assert max(clock.lags_s) >= 13.0
    clock.close()


async def test_sync_never_passes_an_event_that_has_not_run() -> None:
    clock, seen = WallClock(1e6), []
    for number in range(3000):
        clock.at(number * 10.0, seen.append, number * 10.0)
    while len(seen) < 3000:
        now = clock.sync()
        assert seen == [number * 10.0 for number in range(min(int(now / 10) + 1, 3000))]
    clock.close()


async def test_a_closed_clock_does_nothing_more() -> None:
    clock, seen = WallClock(1000.0), []
    clock.at(1.0, seen.append, 1)
    clock.close()
    await asyncio.sleep(0.01)
    assert seen == []


async def test_a_speedup_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="speed-up of 0"):
        WallClock(0)


def test_lag_rows_are_percentiles() -> None:
    assert lag_row([3.0, 1.0, 2.0], "lag") == {"lag_p50_s": 2.0, "lag_p99_s": pytest.approx(2.98), "lag_p100_s": 3.0}
    assert lag_row([], "lag")["lag_p99_s"] == 0.0
