"""The queue: everything through at once unless a hold holds; nothing waits past its deadline; nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.queue import QueueFull, RequestQueue
from policies.types import RouteRequest


def asks(request_id: str, priority: int = 0, num_tokens: int = 10) -> RouteRequest:
    return RouteRequest(request_id, "m", num_tokens, priority=priority)


def ids(requests: tuple[RouteRequest, ...]) -> list[str]:
    return [request.request_id for request in requests]


class SlotsHold:
    """Shortest prompt first, as long as slots are free."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free

    def rank(self, request: RouteRequest, arrived_at: float, now: float) -> float:
        return request.num_tokens

    def admits(self, request: RouteRequest, now: float) -> bool:
        return self.num_free > 0

    def dispatched(self, request: RouteRequest) -> None:
        self.num_free -= 1


def test_without_a_hold_everything_goes_at_once_in_order_of_priority_and_arrival() -> None:
    queue = RequestQueue()
    for request in (asks("a"), asks("b", priority=5), asks("c", priority=-1), asks("d")):
        queue.arrive(request, 0.0)
    assert ids(queue.poll(0.0).ready) == ["c", "a", "d", "b"]
    assert len(queue) == 0
    assert queue.poll(1.0).ready == ()


def test_a_hold_sees_the_fleet_with_the_requests_before_it_dispatched() -> None:
    hold = SlotsHold(2)
    queue = RequestQueue(hold)
    for name, size in (("long", 30), ("short", 10), ("middle", 20)):
        queue.arrive(asks(name, num_tokens=size), 0.0)
    assert ids(queue.poll(0.0, hold.dispatched).ready) == ["short", "middle"]
    assert "long" in queue
    hold.num_free = 1
    assert ids(queue.poll(1.0, hold.dispatched).ready) == ["long"]


def test_a_deadline_expires_even_if_the_request_could_go_now() -> None:
    queue = RequestQueue(SlotsHold(0))
    queue.arrive(asks("late"), 0.0, deadline=5.0)
    queue.arrive(asks("patient"), 0.0)
    assert queue.next_deadline() == 5.0
    assert queue.poll(4.9).expired == ()
    polled = queue.poll(5.0)
    assert (ids(polled.expired), polled.ready) == (["late"], ())
    assert queue.next_deadline() is None


def test_a_cancelled_request_is_gone_and_a_full_queue_says_so() -> None:
    queue = RequestQueue(SlotsHold(0), max_waiting=1)
    queue.arrive(asks("a"), 0.0)
    with pytest.raises(QueueFull, match="1 requests wait already"):
        queue.arrive(asks("b"), 0.0)
    assert queue.cancel("a")
    assert not queue.cancel("a")
    queue.arrive(asks("b"), 0.0)


class QueueMachine(RuleBasedStateMachine):
    """Every request leaves exactly once: ready, expired or cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = SlotsHold(0)
        self.queue = RequestQueue(self.hold, max_waiting=6)
        self.waiting: dict[str, float] = {}
        self.now = 0.0
        self.number = 0

    @rule(priority=st.integers(-1, 1), patience=st.integers(0, 5), size=st.integers(1, 9))
    def arrive(self, priority: int, patience: int, size: int) -> None:
        self.number += 1
        request = asks(str(self.number), priority, size)
        try:
            self.queue.arrive(request, self.now, self.now + patience)
        except QueueFull:
            assert len(self.waiting) == 6
        else:
            self.waiting[request.request_id] = self.now + patience

    @rule(number=st.integers(1, 20))
    def cancel(self, number: int) -> None:
        assert self.queue.cancel(str(number)) == (self.waiting.pop(str(number), None) is not None)

    @rule(seconds=st.integers(0, 3), slots=st.integers(0, 3))
    def poll(self, seconds: int, slots: int) -> None:
        self.now += seconds
        self.hold.num_free = slots
        polled = self.queue.poll(self.now, self.hold.dispatched)
        assert sorted(ids(polled.expired)) == sorted(r for r, d in self.waiting.items() if d <= self.now)
        for request_id in ids(polled.expired) + ids(polled.ready):
            del self.waiting[request_id]
        assert len(polled.ready) == min(slots, len(self.waiting) + len(polled.ready))
        keys = [(request.priority, request.num_tokens) for request in polled.ready]
        assert keys == sorted(keys)

    @invariant()
    def agrees(self) -> None:
        self.queue.check_invariants()
        assert len(self.queue) == len(self.waiting)
        assert self.queue.next_deadline() == min(self.waiting.values(), default=None)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
