"""Whose turn it is among tenants that wait for places."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.fair import FairQueue


def served(queue: FairQueue[str], count: int) -> Counter[str]:
    """How many of the next `count` are whose; items are `tenant number`."""
    taken: Counter[str] = Counter()
    for _ in range(count):
        item = queue.take()
        assert item is not None
        taken[item.split()[0]] += 1
        queue.check_invariants()
    return taken


def flood(queue: FairQueue[str], tenant: str, count: int, weight: float = 1.0, cost: float = 10.0) -> None:
    for number in range(count):
        queue.arrive(tenant, weight, f"{tenant} {number}", cost)


def test_within_a_tenant_first_come_first_served() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "a", 3)
    assert [queue.take() for _ in range(4)] == ["a 0", "a 1", "a 2", None]


def test_a_flood_does_not_starve_the_others() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "flood", 1000)
    served(queue, 100)
    flood(queue, "calm", 5)
    assert served(queue, 11)["calm"] == 5


def test_service_is_what_is_shared_not_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "long", 100, cost=90.0)
    flood(queue, "short", 100, cost=10.0)
    taken = served(queue, 50)
    assert 44 <= taken["short"] <= 46


def test_weights_are_shares() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "high", 100, weight=4.0)
    flood(queue, "low", 100, weight=1.0)
    assert 39 <= served(queue, 50)["high"] <= 41


def test_what_a_request_took_beyond_its_estimate_is_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "a", 10)
    flood(queue, "b", 10)
    served(queue, 2)
    queue.end("a", 10.0, 45.0)
    queue.end("b", 10.0, 10.0)
    assert served(queue, 4) == {"b": 4}  # at 50 it has passed a


def test_a_newcomer_does_not_pay_for_estimates_that_were_too_high() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "flood", 100, cost=500.0)
    served(queue, 8)  # eight places
    flood(queue, "calm", 3, cost=500.0)
    for _ in range(3):
        queue.end("flood", 500.0, 5.0)
    assert served(queue, 3)["calm"] == 3


def test_nobody_saves_up_while_idle() -> None:
    """A tenant that comes back begins level with those that wait, and does not get all it missed at once."""
    queue: FairQueue[str] = FairQueue()
    queue.begin("idle", 1.0, 10.0)
    queue.end("idle", 10.0, 10.0)
    flood(queue, "busy", 400)
    for _ in range(200):
        served(queue, 1)
        queue.end("busy", 10.0, 10.0)
    flood(queue, "idle", 100)
    assert served(queue, 20)["busy"] >= 9


def test_who_leaves_is_not_served() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.arrive("a", 1.0, first := "a 0", 1.0)
    queue.arrive("a", 1.0, "a 1", 1.0)
    assert queue.cancel("a", first)
    assert not queue.cancel("a", first)
    assert not queue.cancel("nobody", first)
    assert queue.take() == "a 1"


def test_the_longest_line_makes_room_for_a_newcomer_and_for_none_of_its_own() -> None:
    queue: FairQueue[str] = FairQueue()
    flood(queue, "flood", 3)
    assert queue.crowd_out("flood") is None
    assert queue.crowd_out("calm") == "flood 2"
    assert queue.crowd_out("calm") == "flood 1"
    assert queue.crowd_out("calm") is None  # one each would be left
    queue.check_invariants()


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "cancel", "take", "begin", "end"]), st.sampled_from("xyz"), st.floats(0, 99)),
    max_size=60,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines
@given(STEPS)
def test_against_lists(steps: list[tuple[str, str, float]]) -> None:
    """Nothing is lost, doubled or served out of turn within its tenant."""
    queue: FairQueue[tuple[str, float]] = FairQueue()
    model: dict[str, deque[tuple[str, float]]] = {name: deque() for name in "xyz"}
    under_way: list[tuple[str, float]] = []
    for what, tenant, cost in steps:
        if what == "arrive":
            model[tenant].append(item := (tenant, cost))
            queue.arrive(tenant, 2.0, item, cost)
        elif what == "cancel" and model[tenant]:
            assert queue.cancel(tenant, model[tenant].pop())
        elif what == "take":
            taken = queue.take()
            assert (taken is None) == (not any(model.values()))
            if taken is not None:
                assert model[taken[0]].popleft() is taken
                under_way.append(taken)
        elif what == "begin":
            queue.begin(tenant, 2.0, cost)
            under_way.append((tenant, cost))
        elif what == "end" and under_way:
            queue.end(*under_way.pop(), service=cost)
        queue.check_invariants()
        assert len(queue) == sum(map(len, model.values()))
