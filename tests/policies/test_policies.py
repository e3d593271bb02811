"""The policies against a live FleetState: where conversations go, and when they stop going there."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from policies.events import Dispatched, Finished, FirstToken
from policies.fleet import FleetState
from policies.registry import DEFAULT_POLICY, UnknownPolicy, make_policy, policy_names
from policies.types import Decision, FleetSnapshot, ReplicaId, ReplicaView
from policies.warm import Warm
from policies.warm_config import WarmConfig
from tests.policies.support import BLOCK, RATES, chain, dispatch, fleet_of, request, serve, view


def choose(name: str, *views: ReplicaView, seed: int = 0, sequence: int = 0) -> Decision:
    snapshot = FleetSnapshot(0.0, sequence, views)
    return make_policy(name).choose(request("r", "x"), snapshot, random.Random(seed))


def route(fleet: FleetState, policy: str, rid: str, path: str, now: float, rng: random.Random) -> Decision:
    """Choose and dispatch, as the router does."""
    asked = request(rid, path)
    decision = make_policy(policy).choose(asked, fleet.snapshot(asked, now), rng)
    fleet.apply(Dispatched(now, decision.replica_id, rid, chain(path), decision.matched_tokens))
    return decision


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_answers_within_the_snapshot_and_the_same_for_the_same_seed(name: str) -> None:
    views = [view("a"), view("b", num_running=3), view("c", matched_tokens=480)]
    first = choose(name, *views, seed=7)
    assert first.policy == make_policy(name).name == name
    assert first.replica_id in {"a", "b", "c"}
    assert first == choose(name, *views, seed=7)
    only = choose(name, view("b"))
    assert (only.replica_id, only.reason) == ("b", "only_replica")


def test_unknown_policies_are_refused_with_the_list() -> None:
    assert DEFAULT_POLICY in policy_names()
    with pytest.raises(UnknownPolicy, match="choose one of warm, warm_queue, round_robin, random, least_loaded"):
        make_policy("worm")


@pytest.mark.parametrize("seed", range(5))
def test_the_second_turn_goes_back_to_the_replica_of_the_first(seed: int) -> None:
    fleet, rng = fleet_of("a", "b", "c", "d"), random.Random(seed)
    first = route(fleet, "warm", "t1", "x" * 60, 0.0, rng)
    fleet.apply(FirstToken(0.1, first.replica_id, "t1", 0))
    fleet.apply(Finished(0.5, first.replica_id, "t1", 30, 0))
    second = route(fleet, "warm", "t2", "x" * 60 + "y" * 5, 5.0, rng)
    assert (first.reason, second.reason) == ("cold", "warm")
    assert second.replica_id == first.replica_id
    assert second.matched_tokens == 60 * BLOCK


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_of_cold_requests_spreads_evenly(seed: int) -> None:
    fleet, rng = fleet_of("a", "b", "c", "d"), random.Random(seed)
    counts = Counter(route(fleet, "warm", f"r{i}", chr(200 + i) * 40, 0.0, rng).replica_id for i in range(40))
    assert sorted(counts.values()) == [10, 10, 10, 10]


@pytest.mark.parametrize("seed", range(5))
def test_cold_requests_one_after_another_spread_over_equal_replicas_despite_noise(seed: int) -> None:
    fleet, rng = fleet_of("a", "b", "c", "d"), random.Random(seed)
    counts: Counter[ReplicaId] = Counter()
    for i in range(200):
        decision = route(fleet, "warm", f"r{i}", chr(200 + i) * 40, float(i), rng)
        counts[decision.replica_id] += 1
        took = 0.1 * rng.uniform(0.85, 1.15)
        fleet.apply(FirstToken(i + took, decision.replica_id, f"r{i}", 0))
        fleet.apply(Finished(i + took + 0.1, decision.replica_id, f"r{i}", 10, 0))
    assert min(counts.values()) > 20, counts


def test_a_warm_replica_that_drowns_loses() -> None:
    fleet, rng = fleet_of("a", "b", num_blocks=10_000), random.Random(0)
    serve(fleet, "a", "t1", "x" * 60, 0.0)
    for i in range(30):
        dispatch(fleet, "a", f"load{i}", chr(200 + i) * 60, 5.0)
    decision = route(fleet, "warm", "t2", "x" * 61, 5.0, rng)
    assert (decision.replica_id, decision.reason) == ("b", "balance")
    assert decision.matched_tokens == 0


def test_a_faster_replica_gets_more_of_a_cold_stream() -> None:
    fleet, rng = fleet_of("slow", "fast"), random.Random(0)
    for i in range(20):
        serve(fleet, "slow", f"s{i}", chr(200 + i) * 40, float(i), prefill_s=1.0, cached=0)
        serve(fleet, "fast", f"f{i}", chr(300 + i) * 40, float(i), prefill_s=0.1, cached=0)
    counts = Counter(route(fleet, "warm", f"r{i}", chr(400 + i) * 40, 100.0, rng).replica_id for i in range(33))
    assert counts[ReplicaId("fast")] > 5 * counts[ReplicaId("slow")] > 0


def test_warm_tells_every_term_in_seconds_and_they_add_up() -> None:
    busy = view("a", matched_tokens=480, queued_prefill_s=0.5, num_waiting=2, num_running=4)
    decision = choose("warm", busy, view("b"))
    assert [score.replica_id for score in decision.scores] == ["a", "b"]
    for score in decision.scores:
        assert score.terms.keys() == {
            "queue",
            "seats",
            "overtaken",
            "prefill",
            "recompute",
            "shared",
            "later",
            "delay",
            "decode",
            "duplicates",
            "room",
        }
        assert score.total == pytest.approx(sum(score.terms.values()))
    terms = decision.scores[0].terms
    prefill = RATES.prefill_s(523, 480)
    assert terms["prefill"] == terms["recompute"] == pytest.approx(prefill)
    assert terms["delay"] == pytest.approx(2 * prefill)
    assert terms["decode"] == pytest.approx(0.1 * 4 * 200.0 * 1e-7 * 1003)
    assert decision.replica_id == "b"
    assert decision.expected_ttft_s == pytest.approx(RATES.prefill_s(1003, 0))


def test_decode_harm_counts_no_more_output_than_may_come() -> None:
    asked = request("r", "x", max_output_tokens=2)
    snapshot = FleetSnapshot(0.0, 0, (view("a", num_running=5),))
    terms = Warm(WarmConfig(kappa=1.0)).choose(asked, snapshot, random.Random(0)).scores[0].terms
    assert terms["decode"] == pytest.approx(5 * 2 * 1e-7 * 1003)


def test_near_ties_go_to_the_longer_match_then_to_fewer_in_flight() -> None:
    tiny = {"num_tokens": 20}
    assert choose("warm", view("a", **tiny), view("b", matched_tokens=16, **tiny)).replica_id == "b"
    picks = {choose("warm", view("a", num_running=1), view("b"), view("c"), seed=s).replica_id for s in range(20)}
    assert picks == {"b", "c"}


def test_round_robin_takes_turns_by_the_sequence() -> None:
    views = (view("a"), view("b"), view("c"))
    assert [choose("round_robin", *views, sequence=i).replica_id for i in range(4)] == ["a", "b", "c", "a"]


def test_least_loaded_counts_requests_then_queued_tokens() -> None:
    assert choose("least_loaded", view("a", num_running=2), view("b", num_waiting=1)).replica_id == "b"
    light, heavy = view("a", num_waiting=1, queued_prefill_tokens=10), view("b", num_waiting=1, queued_prefill_tokens=9)
    assert choose("least_loaded", light, heavy).replica_id == "b"
    assert {choose("least_loaded", view("a"), view("b"), seed=s).replica_id for s in range(20)} == {"a", "b"}


def test_an_excluded_warm_replica_is_not_asked_again() -> None:
    fleet, rng = fleet_of("a", "b"), random.Random(0)
    serve(fleet, "a", "t1", "x" * 60, 0.0)
    asked = request("t2", "x" * 61, excluded=frozenset({ReplicaId("a")}))
    assert make_policy("warm").choose(asked, fleet.snapshot(asked, 1.0), rng).replica_id == "b"
