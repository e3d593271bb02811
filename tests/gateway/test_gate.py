"""The circuit breaker and the slow start, by hand-moved time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.gate import MAX_OPEN_S, OPEN_AFTER, OPEN_S, Gate


def opened(gate: Gate, now: float = 0.0) -> Gate:
    for _ in range(OPEN_AFTER):
        gate.failed(now)
    assert gate.is_open
    return gate


def test_failures_in_a_row_open_it_and_a_success_between_does_not():
    gate = Gate(0.0)
    for _ in range(OPEN_AFTER - 1):
        gate.failed(0.0)
    gate.succeeded(0.0)
    for _ in range(OPEN_AFTER - 1):
        gate.failed(0.0)
    assert gate.admits(0.0, 0, 0.0)
    gate.failed(0.0)
    assert not gate.admits(0.0, 0, 0.0)


def test_one_trial_goes_when_its_time_has_come_and_its_success_closes_it():
    gate = opened(Gate(0.0))
    assert not gate.admits(OPEN_S - 0.1, 0, 0.0)
    assert gate.admits(OPEN_S, 0, 0.0)
    gate.dispatched()
    assert not gate.admits(OPEN_S, 1, 0.0), "one trial at a time"
    gate.succeeded(OPEN_S + 1)
    assert gate.is_plain(OPEN_S + 1)


def test_each_failed_trial_keeps_it_open_twice_as_long_up_to_a_bound():
    gate = opened(Gate(0.0))
    now, length = OPEN_S, OPEN_S
    for _ in range(8):
        assert gate.admits(now, 0, 0.0)
        gate.dispatched()
        gate.failed(now)
        length = min(length * 2, MAX_OPEN_S)
        assert not gate.admits(now + length - 0.1, 0, 0.0)
        now += length


def test_requests_from_before_it_opened_do_not_lengthen_it():
    gate = opened(Gate(0.0))
    gate.failed(OPEN_S - 0.1)
    assert gate.admits(OPEN_S, 0, 0.0)


def test_opening_and_closing_are_told_once_each():
    gate = Gate(0.0)
    assert [gate.failed(0.0) for _ in range(OPEN_AFTER + 2)].index(True) == OPEN_AFTER - 1
    gate.dispatched()
    assert not gate.failed(OPEN_S), "a failed trial opens nothing that was closed"
    gate.dispatched()
    assert [gate.succeeded(4 * OPEN_S), gate.succeeded(4 * OPEN_S)] == [True, False]


def test_a_cancelled_trial_lets_another_one_go():
    gate = opened(Gate(0.0))
    gate.dispatched()
    gate.cancelled()
    assert gate.admits(OPEN_S, 0, 0.0)


def test_a_replica_that_came_back_gets_a_growing_share():
    """Row 20: a ramp, no herd."""
    gate = Gate(10.0)
    gate.came_back(100.0)
    assert gate.admits(100.0, 0, 20.0)
    assert not gate.admits(100.0, 1, 20.0)
    assert gate.admits(105.0, 10, 20.0)
    assert not gate.admits(105.0, 11, 20.0)
    assert gate.admits(110.0, 1000, 20.0)
    assert gate.is_plain(110.0)


EVENTS = st.sampled_from(["failed", "succeeded", "cancelled", "dispatched", "came_back"])


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 30.0))))
def test_whatever_happens_it_admits_again_in_time(events):
    gate = Gate(10.0)
    now = 0.0
    for event, seconds in events:
        now += seconds
        method = getattr(gate, event)
        if event in ("dispatched", "cancelled"):
            method()
        else:
            method(now)
        gate.check_invariants()
    gate.cancelled()
    assert gate.admits(now + MAX_OPEN_S, 0, 0.0)
