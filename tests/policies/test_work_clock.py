"""The work clock: a line in the order of service, what a newcomer overtakes, and time that goes where it was spent."""

from __future__ import annotations

import random
from math import inf

import pytest

from engine_worker.core import waiting_queue
from policies import work_clock
from policies.lease import Lease
from policies.types import PrefixChain, Rates, ReplicaId
from policies.work_clock import AGING, WorkClock

RATES = Rates(base_s=0.0, linear_s=0.001, quadratic_s=0.0, decode_step_s=0.02)
STEP = 100


def lease(name: str, at: float, num_tokens: int, rates: Rates = RATES) -> Lease:
    prompt = PrefixChain((), 16, num_tokens)
    return Lease(name, ReplicaId("a"), prompt, 0, 0, 0, rates.prefill_s(num_tokens, 0), at, rates=rates)


def clock_with(*leases: Lease, step_tokens: int = STEP) -> WorkClock:
    clock = WorkClock(step_tokens)
    for each in leases:
        clock.add(each, -inf)
        clock.check_invariants()
    return clock


def left_s(clock: WorkClock, now: float) -> float:
    return clock.clear_at(now, -inf)[0] - now


def test_the_worker_ages_by_the_same_rate() -> None:
    assert work_clock.AGING == waiting_queue.AGING


def test_first_come_first_served_overtakes_nobody() -> None:
    clock = clock_with(lease("long", 0.0, 5000), lease("short", 1.0, 10), step_tokens=0)
    assert [each.request_id for each in clock.line] == ["long", "short"]
    assert left_s(clock, 1.0) == pytest.approx(4.01)
    assert clock.overtaken_s(0.01, 1.0, -inf) == 0.0


def test_news_that_come_late_find_the_head_begun() -> None:
    """Another gateway's request may have come before ours, and its news after it."""
    clock = clock_with(lease("ours", 1.0, 1000), lease("theirs", 0.5, 1000), step_tokens=0)
    assert [each.request_id for each in clock.line] == ["ours", "theirs"]
    assert left_s(clock, 1.0) == pytest.approx(2.0)
    for served in list(clock.line):
        clock.remove(served, 3.0, True, -inf)
        clock.check_invariants()


def test_where_tokens_seem_to_take_no_time_a_long_prompt_is_one_step() -> None:
    """A fit of replicas with no more than a request's base time has coefficients of 0."""
    rates = Rates(base_s=4.0, linear_s=0.0, quadratic_s=0.0, decode_step_s=0.02)
    clock = clock_with(lease("long", 0.0, 5000, rates))
    assert clock.overtaken_s(0.01, 1.0, -inf) == 0.0
    clock.add(lease("short", 1.0, 10), -inf)
    clock.check_invariants()
    assert left_s(clock, 1.0) == pytest.approx(3.0 + 0.01)


def test_a_short_prompt_overtakes_a_long_one_but_for_the_step_under_way() -> None:
    clock = clock_with(lease("long", 0.0, 5000), lease("longer", 0.0, 9000))
    # 1.23 s in, the step that began at 1.2 lasts until 1.3
    assert left_s(clock, 1.23) == pytest.approx(14.0 - 1.23)
    assert clock.overtaken_s(0.01, 1.23, -inf) == pytest.approx(14.0 - 1.3)
    # between the two in length: it waits for the first
    assert clock.overtaken_s(7.0, 1.23, -inf) == pytest.approx(9.0)
    assert clock.overtaken_s(9.1, 1.23, -inf) == 0.0


def test_a_prompt_that_ends_with_the_step_under_way_is_not_interrupted() -> None:
    clock = clock_with(lease("first", 0.0, STEP), lease("long", 0.0, 5000))
    assert clock.overtaken_s(0.01, 0.04, -inf) == pytest.approx(5.0)


def test_later_steps_of_a_long_prompt_take_longer() -> None:
    rates = Rates(base_s=0.0, linear_s=0.0, quadratic_s=0.001, decode_step_s=0.02)
    clock = clock_with(lease("long", 0.0, 1000, rates))  # x tokens take x * x / 2000 s
    total = 500.0
    for now, step_ends in ((0.0, 5.0), (6.0, 20.0), (404.0, 405.0), (406.0, 500.0)):
        assert clock.overtaken_s(0.0, now, -inf) == pytest.approx(total - step_ends, abs=1e-6)


def test_what_was_overtaken_goes_on_with_what_is_left_of_it() -> None:
    long, short = lease("long", 0.0, 5000), lease("short", 1.23, 10)
    clock = clock_with(long, short)
    assert [each.request_id for each in clock.line] == ["short", "long"]
    assert long.left_s == pytest.approx(5.0 - 1.3)
    assert left_s(clock, 1.23) == pytest.approx(5.01 - 1.23)
    assert clock.overtaken_s(0.001, 1.25, -inf) == pytest.approx(5.01 - 1.3)  # it overtakes both in the same step
    clock.remove(short, 1.32, True, -inf)
    assert left_s(clock, 1.32) == pytest.approx(3.7)
    clock.remove(long, 5.0, True, -inf)
    assert clock.line == []


def test_what_is_nearly_done_is_not_overtaken_by_what_is_shorter_as_a_whole() -> None:
    long, short = lease("long", 0.0, 1000), lease("short", 0.83, 500)  # 0.1 s are left after the step under way
    assert clock_with(long).overtaken_s(0.5, 0.83, -inf) == 0.0
    assert clock_with(long).overtaken_s(0.05, 0.83, -inf) == pytest.approx(0.1)
    clock = clock_with(long, short)
    assert [each.request_id for each in clock.line] == ["long", "short"]
    assert not long.interrupted
    assert left_s(clock, 0.83) == pytest.approx(1.5 - 0.83)


# 3 s were its own and half a second the head's; or the head was computed all the time, and has overrun by 1.5 s
@pytest.mark.parametrize(("served", "expected"), [(True, 2.0 - 0.5), (False, 0.75)])
def test_time_goes_to_who_was_served_in_it(served: bool, expected: float) -> None:
    second = lease("second", 0.0, 3000)
    clock = clock_with(lease("first", 0.0, 2000), second)
    clock.remove(second, 3.5, served, -inf)
    assert left_s(clock, 3.5) == pytest.approx(expected)
    clock.check_invariants()


def test_a_head_that_overruns_is_expected_to_take_half_as_long_again() -> None:
    clock = clock_with(lease("head", 0.0, 1000), lease("next", 0.0, 2000))
    assert left_s(clock, 3.0) == pytest.approx(2.0 + 1.0)


def test_others_prompts_go_first() -> None:
    clock = WorkClock(STEP)
    clock.add(lease("long", 0.0, 5000), 2.0)
    assert clock.clear_at(1.0, 2.0) == (7.0, 7.0)
    assert clock.overtaken_s(0.01, 1.0, 2.0) == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_that_does_as_predicted_is_predicted(seed: int) -> None:
    """Against a server that really works off its line step by step, the shortest first."""
    rng = random.Random(seed)
    clock, now, step_ends = WorkClock(STEP), 0.0, 0.0
    left: dict[str, int] = {}  # tokens
    leases: dict[str, Lease] = {}
    under_way: tuple[str, int] | None = None

    def work_until(moment: float) -> None:
        nonlocal under_way, step_ends
        while under_way is not None and step_ends <= moment:
            name, size = under_way
            left[name] -= size
            if not left[name]:
                clock.remove(leases[name], step_ends, True, -inf)
                clock.check_invariants()
                del left[name], leases[name]
            under_way = None
            begin(step_ends)

    def place(name: str, num_left: int) -> float:
        return leases[name].dispatched_at + num_left * RATES.linear_s / AGING

    def begin(at: float) -> None:
        nonlocal under_way, step_ends
        if left:
            name = min(left, key=lambda each: place(each, left[each]))
            size = min(left[name], STEP)
            under_way, step_ends = (name, size), at + size * RATES.linear_s

    for number in range(60):
        now += rng.expovariate(1 / 0.4)
        work_until(now)
        new = lease(str(number), now, rng.choice([10, 60, 100, 300, 1500]))
        rest = step_ends - now if under_way is not None else 0.0
        ahead = sum(left.values()) * RATES.linear_s
        if under_way is not None:
            ahead += rest - under_way[1] * RATES.linear_s
            assert left_s(clock, now) == pytest.approx(ahead, abs=1e-6)
            own_place = now + new.prefill_s / AGING
            after = {each: n - under_way[1] * (each == under_way[0]) for each, n in left.items()}
            behind = sum(n for each, n in after.items() if place(each, n) > own_place) * RATES.linear_s
            assert clock.overtaken_s(new.prefill_s, now, -inf) == pytest.approx(behind, abs=1e-6)
        leases[new.request_id], left[new.request_id] = new, new.num_uncached_tokens
        clock.add(new, -inf)
        clock.check_invariants()
        if under_way is None:
            begin(now)
