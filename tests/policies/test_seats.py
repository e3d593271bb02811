"""Replicas that compute few requests at once: what the load book makes of their seats, and what `warm` does."""

from __future__ import annotations

import random

import pytest

from policies.cost import SpeedModel
from policies.events import FirstToken, Joined, Restarted, StatsReported
from policies.fleet import FleetState
from policies.lease import Lease
from policies.load import ReplicaLoad
from policies.registry import make_policy
from policies.types import FleetSnapshot, ReplicaId, ReplicaView
from policies.warm import Warm
from policies.warm_config import WarmConfig
from tests.policies.support import BLOCK, MODEL, RATES, SPACE, chain, dispatch, fleet_of, request, view
from tests.policies.test_load import Recorder, lease

ANSWER_S = 200 * RATES.decode_step_s  # of 200 tokens, nothing in the cache


def full(num_seats: int = 2, step_tokens: int = 0, speed: SpeedModel | None = None) -> ReplicaLoad:
    """All seats have had their first token at 1.0."""
    load = ReplicaLoad(speed or SpeedModel(), step_tokens, num_seats)
    for i in range(num_seats):
        load.first_token(lease(load, f"r{i}", 0.0), 1.0, 0)
    load.refresh(1.0, 0)
    return load


def fleet_with_seats(num_seats: int) -> FleetState:
    fleet = FleetState()
    for name in "ab":
        fleet.apply(Joined(0.0, ReplicaId(name), "one", frozenset({MODEL}), SPACE, BLOCK, 1000, num_seats=num_seats))
    return fleet


def seen(fleet: FleetState, now: float) -> list[ReplicaView]:
    return list(fleet.snapshot(request("probe", "q"), now).replicas)


def run_at_a(fleet: FleetState, count: int) -> None:
    for i in range(count):
        dispatch(fleet, "a", f"r{i}", chr(300 + i), 0.0)
        fleet.apply(FirstToken(0.1, ReplicaId("a"), f"r{i}"))


def test_the_kth_in_the_line_waits_for_k_of_the_answers_to_end() -> None:
    load = full()
    load.kv_tokens = 0
    waits = []
    for i in range(3):
        load.refresh(1.0, 0)
        waits.append(load.seat_wait_s(0.1, 1.0, 200.0, RATES))
        load.dispatched(Lease(f"w{i}", ReplicaId("a"), chain("x"), 0, 0, 0, 0.1, 1.0))
    assert waits == pytest.approx([ANSWER_S / 2, 2 * ANSWER_S / 2, 3 * ANSWER_S / 2])


def test_those_that_it_overtakes_have_no_seat_before_it() -> None:
    load = full(step_tokens=32)
    load.kv_tokens = 0
    for name, prefill_s in (("short", 0.1), ("long", 5.0)):
        load.dispatched(Lease(name, ReplicaId("a"), chain("x"), 0, 0, 0, prefill_s, 1.0))
    load.refresh(1.0, 0)
    waits = [load.seat_wait_s(prefill_s, 1.0, 200.0, RATES) for prefill_s in (0.05, 1.0, 9.0)]
    assert waits == pytest.approx([ANSWER_S / 2, ANSWER_S, 3 * ANSWER_S / 2])


def test_while_all_seats_are_taken_the_work_clock_stands() -> None:
    load = full()
    waiting = Lease("w", ReplicaId("a"), chain("x"), 0, 0, 0, 0.5, 1.0)
    load.dispatched(waiting)
    for now in (1.0, 2.0, 9.0):
        assert load.figures(now, 0).queued_prefill_s == pytest.approx(0.5)
    load.ended(load.running["r0"], 9.0)
    assert load.figures(9.2, 0).queued_prefill_s == pytest.approx(0.3)
    load.check_invariants()


def test_a_silent_request_is_not_thought_to_run_before_it_has_a_seat() -> None:
    load = full()
    load.dispatched(Lease("w", ReplicaId("a"), chain("x"), 0, 0, 0, 0.5, 1.0, streamed=False))
    load.advance(50.0)
    assert list(load.waiting) == ["w"]
    load.ended(load.running["r0"], 50.0)
    load.advance(51.0)
    assert list(load.running) == ["r1", "w"]


def test_the_wait_for_a_seat_teaches_nothing_about_prefill() -> None:
    speed = Recorder()
    load = full(speed=speed)
    speed.prefills.clear()
    waiting = lease(load, "w", 1.0)
    load.ended(load.running["r0"], 9.0)
    load.first_token(waiting, 9.5, 0)
    assert speed.prefills == [(1, 160, 0.5)]


def test_a_wait_is_seen_where_all_seats_are_taken_alone() -> None:
    fleet = fleet_with_seats(2)
    run_at_a(fleet, 1)
    assert [each.seat_wait_s for each in seen(fleet, 1.0)] == [0.0, 0.0]
    dispatch(fleet, "a", "last", "z", 1.0)  # has the other seat, though not its first token
    a, b = seen(fleet, 1.0)
    assert a.seat_wait_s > 0.0 == b.seat_wait_s
    fleet.apply(Restarted(2.0, ReplicaId("a"), "two"))
    run_at_a(fleet, 2)
    assert seen(fleet, 2.0)[0].seat_wait_s > 0.0, "as many as before, where it isn't told"
    fleet.apply(Restarted(3.0, ReplicaId("a"), "three", num_seats=3))
    run_at_a(fleet, 2)
    assert seen(fleet, 3.0)[0].seat_wait_s == 0.0
    fleet.check_invariants()


def test_where_nobody_tells_the_seats_there_is_no_wait_for_them() -> None:
    fleet = fleet_of("a", "b")
    run_at_a(fleet, 500)
    assert seen(fleet, 1.0)[0].seat_wait_s == 0.0


def test_a_worker_that_was_started_with_other_options_is_what_it_says() -> None:
    fleet = fleet_with_seats(2)
    for incarnation, told, step_tokens in (("two", 0, 512), ("three", 1, 0)):
        fleet.apply(Restarted(2.0, ReplicaId("a"), incarnation))
        fleet.apply(
            Joined(2.0, ReplicaId("a"), incarnation, frozenset({MODEL}), SPACE, BLOCK, 1000, num_seats=told,
                   step_tokens=step_tokens)
        )  # fmt: skip
        run_at_a(fleet, 2)
        assert (seen(fleet, 2.0)[0].seat_wait_s > 0.0) == bool(told)
        load = fleet._replicas[ReplicaId("a")].load
        assert (load.num_seats, load.clock.step_tokens) == (told, step_tokens)
        fleet.check_invariants()


@pytest.mark.parametrize("told", [-1, 10**400])
def test_seats_that_nobody_can_have_count_as_not_told(told: int) -> None:
    fleet = fleet_with_seats(told)
    run_at_a(fleet, 3)
    dispatch(fleet, "a", "last", "z", 1.0)
    queued = [seen(fleet, now)[0] for now in (1.0, 1.000001)]
    assert [each.seat_wait_s for each in queued] == [0.0, 0.0]
    assert queued[1].queued_prefill_s < queued[0].queued_prefill_s, "the work clock runs"
    fleet.apply(Restarted(2.0, ReplicaId("a"), "two", num_seats=told))
    run_at_a(fleet, 3)
    assert seen(fleet, 2.0)[0].seat_wait_s == 0.0


def test_others_requests_take_seats_too() -> None:
    fleet = fleet_with_seats(2)
    fleet.apply(StatsReported(0.0, ReplicaId("a"), num_running=2, num_waiting=0, kv_usage=0.0))
    assert [each.seat_wait_s > 0.0 for each in seen(fleet, 0.1)] == [True, False]


@pytest.mark.parametrize(("name", "chosen"), [("warm", "b"), ("warm:seats=0", "a")])
def test_a_request_leaves_its_prefix_for_a_seat(name: str, chosen: str) -> None:
    views = (view("a", matched_tokens=480, num_running=8, seat_wait_s=1.0), view("b", num_running=8))
    decision = make_policy(name).choose(request("r", "x"), FleetSnapshot(0.0, 0, views), random.Random(0))
    assert decision.replica_id == chosen


def test_the_wait_has_a_term_of_its_own() -> None:
    snapshot = FleetSnapshot(0.0, 0, (view("a", seat_wait_s=1.0), view("b")))
    decision = Warm(WarmConfig(seats=0.25)).choose(request("r", "x"), snapshot, random.Random(0))
    assert [score.terms["seats"] for score in decision.scores] == [0.25, 0.0]
    assert decision.scores[0].total - decision.scores[1].total == pytest.approx(0.25)
