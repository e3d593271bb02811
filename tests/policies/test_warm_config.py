"""Each refinement of `warm` by itself: what it changes, and that nothing changes without it."""

from __future__ import annotations

import random

import pytest

from policies.events import FirstToken, Restarted
from policies.fleet import FleetConfig, FleetState
from policies.types import FleetSnapshot, ReplicaId, ReplicaView, Score
from policies.warm import Warm
from policies.warm_config import WarmConfig
from tests.policies.support import RATES, dispatch, fleet_of, matched_blocks, request, serve, view

BUSY = view(
    "a",
    matched_tokens=480,
    queued_prefill_s=0.5,
    num_waiting=2,
    num_running=4,
    eviction_s=1e-4,
    overtaken_s=0.3,
    typical_queue=1.5,
    seat_wait_s=0.4,
)
COLD = view("b", eviction_s=2e-4, num_waiting=4)


def scores(config: WarmConfig, *views: ReplicaView, typical_queue: float = 1.5, num_alike: int = 0) -> list[Score]:
    snapshot = FleetSnapshot(0.0, 0, views or (BUSY, COLD), typical_queue=typical_queue, num_alike=num_alike)
    return list(Warm(config).choose(request("r", "x"), snapshot, random.Random(0)).scores)


def changed(config: WarmConfig) -> set[str]:
    """Names of the terms that differ from the default's at either replica."""
    pairs = [(was.terms, now.terms) for was, now in zip(scores(WarmConfig()), scores(config), strict=True)]
    return {name for was, now in pairs for name in was if was[name] != now[name]}


@pytest.mark.parametrize(
    ("config", "terms"),
    [
        (WarmConfig(tau=4.0), {"recompute"}),
        (WarmConfig(kappa=1.0), {"decode"}),
        (WarmConfig(delay=0.0), {"delay"}),
        (WarmConfig(later=3.0), {"later"}),
        (WarmConfig(duplicate_price=0.0), {"duplicates"}),
        (WarmConfig(overtake=False), {"overtaken", "decode"}),
        (WarmConfig(order=False), {"overtaken", "decode"}),  # the replica then serves in the order of arrival
        (WarmConfig(room=0.5), set()),  # both are full
        (WarmConfig(seats=0.0), {"seats"}),
        (WarmConfig(quadratic=False), {"prefill", "recompute", "later", "delay"}),
    ],
)
def test_a_setting_changes_its_own_terms_alone(config: WarmConfig, terms: set[str]) -> None:
    assert changed(config) == terms


@pytest.mark.parametrize("config", [WarmConfig(), WarmConfig(tau=4, kappa=1, delay=0.5), WarmConfig(quadratic=False)])
def test_the_fast_sum_is_the_sum_of_the_terms(config: WarmConfig) -> None:
    views = (BUSY, COLD, view("c", matched_tokens=960))
    policy, snapshot = Warm(config), FleetSnapshot(0.0, 0, views, typical_queue=1.5, num_alike=9)
    weights = policy._weights(request("r", "x"), snapshot)
    named = policy._scores(snapshot.replicas, weights)
    assert policy._costs(snapshot.replicas, weights) == pytest.approx([score.total for score in named])
    assert [score.total for score in named] == pytest.approx([sum(score.terms.values()) for score in named])


def test_those_who_run_with_the_same_prefix_share_the_cost_of_a_copy() -> None:
    assert [score.terms["shared"] for score in scores(WarmConfig(), num_alike=6)] == [0.0, 0.0]  # 2 + 4 wait
    holder, other = scores(WarmConfig(), num_alike=6 + 3)
    assert holder.terms["shared"] == 0.0
    missing_s = RATES.prefill_s(480, 0) - RATES.base_s
    weight = 2.0 + 4  # own and recompute; those who wait there
    assert other.terms["shared"] == pytest.approx(-0.75 * weight * missing_s)
    alone = scores(WarmConfig(alike=False), num_alike=6 + 3)
    assert [score.terms["shared"] for score in alone] == [0.0, 0.0]


@pytest.mark.parametrize(("num_alike", "chosen"), [(0, "a"), (40, "b")])
def test_a_prompt_that_all_begin_with_leaves_the_replica_where_all_run(num_alike: int, chosen: str) -> None:
    crowd = view("a", matched_tokens=960, num_running=40)
    snapshot = FleetSnapshot(0.0, 0, (crowd, view("b")), num_alike=num_alike)
    assert Warm().choose(request("r", "x"), snapshot, random.Random(0)).replica_id == chosen


def test_only_duplicates_are_charged_by_what_they_push_out_where_they_go() -> None:
    a, b = scores(WarmConfig())
    assert a.terms["duplicates"] == 0.0  # it holds the longest match
    # 480 tokens are held elsewhere; mean queue (2 + 4) / 2
    assert b.terms["duplicates"] == pytest.approx((2 + 3) * 2e-4 * 480)
    new = scores(WarmConfig(), view("a", eviction_s=1e-4), view("b", eviction_s=1.0))
    assert [score.terms["duplicates"] for score in new] == [0.0, 0.0]
    assert [score.terms["room"] for score in new] == [0.0, 0.0]


def test_new_blocks_are_charged_where_they_push_something_out_while_another_replica_has_room() -> None:
    full, empty = view("a", matched_tokens=480, eviction_s=1e-4), view("b")
    a, b = scores(WarmConfig(), full, empty, typical_queue=0.0)
    assert a.terms["room"] == pytest.approx(2 * 1e-4 * (1003 - 480))
    assert (b.terms["room"], b.terms["duplicates"]) == (0.0, 0.0)
    assert scores(WarmConfig(), full, full, empty, typical_queue=0.0)[0].terms["room"] == 0.0  # too few have room
    assert scores(WarmConfig(), full, empty)[0].terms["room"] == 0.0  # a busy fleet spreads by itself
    # what is held already takes no room
    held = scores(WarmConfig(), view("a", matched_tokens=1002, eviction_s=1e-4), empty, typical_queue=0.0)
    assert held[0].terms["room"] == pytest.approx(2 * 1e-4)


def test_sessions_that_share_a_beginning_leave_a_full_replica_for_an_empty_one() -> None:
    full = view("a", matched_tokens=480, eviction_s=4e-4)
    snapshot = FleetSnapshot(0.0, 0, (full, view("b")))
    piled = Warm(WarmConfig(room=0.0)).choose(request("r", "x"), snapshot, random.Random(0))
    spread = Warm().choose(request("r", "x"), snapshot, random.Random(0))
    assert (piled.replica_id, spread.replica_id) == ("a", "b")


def test_work_weighs_more_the_more_requests_usually_wait() -> None:
    def choice(typical_queue: float) -> str:
        # waiting for a costs 0.15 s more than computing 480 tokens again at b twice
        queue = 2 * (RATES.prefill_s(1003, 0) - RATES.prefill_s(523, 480)) + 0.15
        views = (
            view("a", matched_tokens=480, queued_prefill_s=queue, typical_queue=typical_queue),
            view("b", typical_queue=typical_queue),
        )
        snapshot = FleetSnapshot(0.0, 0, views)
        return Warm().choose(request("r", "x"), snapshot, random.Random(0)).replica_id

    assert [choice(0.0), choice(6.0), choice(1e9)] == ["b", "a", "a"]


def typical_queues(fleet: FleetState, now: float) -> list[float]:
    """The fleet's, then each replica's."""
    snapshot = fleet.snapshot(request("p", "q"), now)
    return [snapshot.typical_queue, *(each.typical_queue for each in snapshot.replicas)]


def test_the_typical_queue_is_what_waits_over_time() -> None:
    fleet = fleet_of("a", "b")
    assert typical_queues(fleet, 0.0) == [0.0, 0.0, 0.0]
    for i in range(300):  # one request waits at a, and half of the time a second one; none at b
        dispatch(fleet, "a", f"r{i}", "x" * 4, float(i))
        if i:
            fleet.apply(FirstToken(i + 0.5, ReplicaId("a"), f"r{i - 1}"))
    assert typical_queues(fleet, 300.0) == pytest.approx([0.75, 1.5, 0.0], abs=0.01)


def bursts(fleet: FleetState, num_bursts: int, every_s: float, size: int = 8) -> float:
    """At a all of a burst come at once and have their first tokens a tenth of a second after each other. Returns when
    the last has its own."""
    for burst in range(num_bursts):
        names = [f"{burst}/{i}" for i in range(size)]
        for name in names:
            dispatch(fleet, "a", name, "x" * 4, burst * every_s)
        for i, name in enumerate(names, 1):
            fleet.apply(FirstToken(burst * every_s + i / 10, ReplicaId("a"), name))
    return (num_bursts - 1) * every_s + size / 10


def test_a_burst_that_finds_itself_waiting_is_no_queue_that_lasts() -> None:
    fleet = fleet_of("a")
    at = bursts(fleet, 60, every_s=10.0)
    # (8 + 7 + ... + 1) tenths in ten seconds, though those of a burst find 3.5 others on average
    assert typical_queues(fleet, at) == pytest.approx([0.36, 0.36], abs=0.05)


def test_bursts_that_follow_each_other_closely_are_a_queue() -> None:
    fleet = fleet_of("a")
    at = bursts(fleet, 60, every_s=0.8)
    assert typical_queues(fleet, at) == pytest.approx([4.5, 4.5], abs=0.1)


def test_a_night_without_requests_does_not_hide_the_mornings_queue_for_long() -> None:
    fleet = fleet_of("a")
    at = bursts(fleet, 10, every_s=0.8) + 30_000.0
    for i in range(200):  # always two wait, after the first
        dispatch(fleet, "a", f"m{i}", "x" * 4, at + i)
        if i > 1:
            fleet.apply(FirstToken(at + i, ReplicaId("a"), f"m{i - 2}"))
    assert typical_queues(fleet, at + 200)[0] == pytest.approx(2.0, abs=0.1)


def test_a_restarted_replica_has_no_usual_queue() -> None:
    fleet = fleet_of("a", "b")
    at = bursts(fleet, 60, every_s=0.8)
    fleet.apply(Restarted(at, ReplicaId("a"), "two"))
    assert typical_queues(fleet, at)[1] == 0.0
    dispatch(fleet, "b", "next", "x" * 4, at)
    assert typical_queues(fleet, at)[1] == 0.0


def test_the_price_keeps_a_prefix_together_that_load_would_spread() -> None:
    # waiting for a costs 0.105 s more than computing 480 tokens again at b, twice, in an idle fleet
    queue = 2 * (RATES.prefill_s(1003, 0) - RATES.prefill_s(523, 480)) + 0.03
    full = (view("a", matched_tokens=480, queued_prefill_s=queue, eviction_s=1e-4), view("b", eviction_s=1e-4))
    snapshot = FleetSnapshot(0.0, 0, full)
    free = Warm(WarmConfig(duplicate_price=0.0)).choose(request("r", "x"), snapshot, random.Random(0))
    priced = Warm().choose(request("r", "x"), snapshot, random.Random(0))
    assert (free.replica_id, priced.replica_id) == ("b", "a")


def test_without_the_quadratic_term_a_long_prompt_costs_what_its_tokens_do() -> None:
    [linear] = scores(WarmConfig(quadratic=False), view("a", num_tokens=100_000))
    assert linear.terms["prefill"] == pytest.approx(0.01 + 10.0)
    [full] = scores(WarmConfig(), view("a", num_tokens=100_000))
    assert full.terms["prefill"] == pytest.approx(0.01 + 10.0 + 2e-9 * 1e10 / 2)


def test_a_price_is_learned_once_a_replica_is_full_and_its_blocks_come_back() -> None:
    fleet = fleet_of("a", num_blocks=20)

    def eviction_s(now: float) -> float:
        return fleet.snapshot(request("probe", "q"), now).replicas[0].eviction_s

    for i in range(3):
        serve(fleet, "a", f"r{i}", chr(300 + i) * 6, float(10 * i))
    assert eviction_s(30.0) == 0.0  # 18 blocks of 20, less a block for what an output may need
    for turn in range(2, 8):  # five prompts of six blocks in turn where three have room: each comes back after 50 s
        for i in range(5):
            serve(fleet, "a", f"t{turn}-{i}", chr(300 + i) * 6, float(50 * turn + 10 * i))
    assert eviction_s(400.0) == 0.0  # prompts shorter than a unit of 512 tokens aren't followed
    big = fleet_of("a", num_blocks=200)
    for turn in range(6):
        for i in range(5):
            serve(big, "a", f"t{turn}-{i}", chr(300 + i) * 60, float(50 * turn + 10 * i))
    assert big.snapshot(request("probe", "q"), 300.0).replicas[0].eviction_s > 0.0
    big.check_invariants()


def mirror(config: FleetConfig) -> FleetState:
    return fleet_of("a", num_blocks=10, config=config)


def test_pins_keep_a_running_prompt_from_being_thought_evicted() -> None:
    for pins, expected in ((True, 6), (False, 0)):
        fleet = mirror(FleetConfig(mirror_pins=pins, mirror_outputs=False))
        dispatch(fleet, "a", "long", "x" * 6, 0.0)
        fleet.apply(FirstToken(0.1, ReplicaId("a"), "long"))
        for i in range(3):
            serve(fleet, "a", f"r{i}", chr(300 + i) * 5, float(i + 1))
        assert matched_blocks(fleet, "x" * 6, 5.0)["a"] == expected
        fleet.check_invariants()


def test_room_for_outputs_is_left_only_when_asked_for() -> None:
    for outputs, expected in ((True, 5), (False, 10)):
        fleet = mirror(FleetConfig(mirror_outputs=outputs, initial_output_tokens=1000.0))
        serve(fleet, "a", "r", "x" * 10, 0.0)
        dispatch(fleet, "a", "other", "y", 1.0)
        held = fleet.stats(ReplicaId("a")).num_index_blocks
        assert held == expected
        fleet.check_invariants()


def test_a_mirror_that_does_not_learn_keeps_its_capacity() -> None:
    for learns, expected in ((True, 9), (False, 10)):
        fleet = mirror(FleetConfig(mirror_learns=learns))
        serve(fleet, "a", "r1", "x" * 8, 0.0, cached=0)
        serve(fleet, "a", "r2", "x" * 8, 1.0, cached=0)  # eight blocks were expected, none came
        assert fleet.stats(ReplicaId("a")).index_capacity_blocks == expected


def test_a_replica_is_told_the_work_that_is_left_of_the_prompt_there() -> None:
    snapshot = FleetSnapshot(0.0, 0, (BUSY, COLD))
    for config in (WarmConfig(), WarmConfig(order=False)):
        decision = Warm(config).choose(request("r", "x"), snapshot, random.Random(0))
        [chosen] = [each for each in snapshot.replicas if each.replica_id == decision.replica_id]
        work_s = chosen.rates.prefill_s(chosen.num_tokens - chosen.matched_tokens, chosen.matched_tokens)
        assert decision.work_s == (work_s if config.order else None)


@pytest.mark.parametrize(("overtake", "expected"), [(True, "a"), (False, "b")])
def test_a_request_does_not_shun_a_queue_that_it_overtakes(overtake: bool, expected: str) -> None:
    busy = view("a", matched_tokens=990, queued_prefill_s=1.0, num_waiting=1, overtaken_s=0.95)
    snapshot = FleetSnapshot(0.0, 0, (busy, view("b")))
    decision = Warm(WarmConfig(overtake=overtake)).choose(request("r", "x"), snapshot, random.Random(0))
    assert decision.replica_id == expected
    work_s = RATES.prefill_s(13, 990) if overtake else RATES.prefill_s(1003, 0)
    assert decision.expected_ttft_s == pytest.approx(work_s + (0.05 if overtake else 0.0))


def test_what_is_overtaken_stands_between_the_later_tokens() -> None:
    beside = [each.terms["decode"] for each in scores(WarmConfig(), view("a", overtaken_s=3.0), view("b"))]
    assert beside == pytest.approx([WarmConfig().kappa * 3.0, 0.0])


def test_work_weighs_more_where_requests_usually_wait() -> None:
    views = (view("a", typical_queue=2.0), view("b", typical_queue=0.5), view("c", typical_queue=1e9))
    p = RATES.prefill_s(1003, 0)
    assert [each.terms["later"] for each in scores(WarmConfig(), *views)] == pytest.approx([2.0 * p, 0.5 * p, 8.0 * p])
