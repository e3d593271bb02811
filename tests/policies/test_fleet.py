"""FleetState: what each event does to what a policy sees."""

from __future__ import annotations

import pytest

from policies.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Dispatched,
    Failed,
    FailureKind,
    FeedLost,
    Finished,
    FirstToken,
    Joined,
    Restarted,
    StatsReported,
    StatusChanged,
)
from policies.fleet import FleetConfig, FleetState
from policies.types import KeySpace, PrefixChain, ReplicaId, ReplicaStatus, ReplicaView, RouteRequest
from tests.policies.support import (
    BLOCK,
    MODEL,
    chain,
    dispatch,
    fleet_of,
    joined,
    keys,
    matched_blocks,
    request,
    serve,
)

A = ReplicaId("a")


def view_of(fleet: FleetState, now: float, name: str = "a") -> ReplicaView:
    views = fleet.snapshot(request("probe", "z"), now).replicas
    return next(view for view in views if view.replica_id == name)


def test_a_snapshot_has_ready_replicas_of_the_model_that_are_not_excluded_by_id() -> None:
    fleet = fleet_of("d", "b", "a", "c")
    fleet.apply(StatusChanged(0.0, ReplicaId("b"), ReplicaStatus.DRAINING))
    fleet.apply(Joined(0.0, ReplicaId("other"), "one", frozenset({"n"}), KeySpace("s"), 16))
    snapshot = fleet.snapshot(request("r", "xy", excluded=frozenset({ReplicaId("c")})), 1.0)
    assert [view.replica_id for view in snapshot.replicas] == ["a", "d"]


def test_a_replica_of_another_key_space_is_matched_by_its_own_chain() -> None:
    fleet = fleet_of("a")
    text = KeySpace("text")
    fleet.apply(Joined(0.0, ReplicaId("t"), "one", frozenset({MODEL}), text, 32, 100))
    prompt = PrefixChain(keys("tt"), 32, 70)
    fleet.apply(Dispatched(0.0, ReplicaId("t"), "r", prompt, 0))
    fleet.apply(Finished(1.0, ReplicaId("t"), "r", 5))
    both = RouteRequest("s", MODEL, 80, {text: prompt, KeySpace("tokens/16"): chain("tt")})
    views = {view.replica_id: view for view in fleet.snapshot(both, 2.0).replicas}
    assert (views[ReplicaId("t")].matched_tokens, views[ReplicaId("t")].num_tokens) == (64, 70)
    assert views[A].num_tokens == chain("tt").num_tokens
    without = RouteRequest("s", MODEL, 80, {})
    assert [(v.matched_tokens, v.num_tokens) for v in fleet.snapshot(without, 2.0).replicas] == [(0, 80), (0, 80)]


def test_matched_tokens_leave_one_token_to_compute() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", "r", "xyz", 0.0)
    even = PrefixChain(keys("xyz"), BLOCK, 3 * BLOCK)
    view = fleet.snapshot(RouteRequest("s", MODEL, even.num_tokens, {KeySpace("tokens/16"): even}), 1.0).replicas[0]
    assert view.matched_tokens == 2 * BLOCK, "the last token's block is computed anew"


def test_those_under_way_with_all_that_the_best_match_holds_are_counted() -> None:
    fleet = fleet_of("a", "b")

    def num_alike(path: str) -> int:
        return fleet.snapshot(request("probe", path), 9.0).num_alike

    assert num_alike("xyz") == 0
    serve(fleet, "a", "r0", "xyz", 0.0)
    assert num_alike("xyz") == 0
    dispatch(fleet, "a", "r1", "xyz", 1.0)
    dispatch(fleet, "a", "r2", "xyq", 1.0)
    dispatch(fleet, "b", "r3", "xy", 1.0)
    assert (num_alike("xyz"), num_alike("xyp"), num_alike("k")) == (1, 3, 0)
    fleet.apply(Finished(2.0, A, "r2", 1))
    assert num_alike("xyp") == 2
    fleet.apply(Failed(2.0, ReplicaId("b"), "r3", FailureKind.BROKEN))
    assert num_alike("xyp") == 1
    fleet.check_invariants()


def test_a_request_in_flight_is_seen_by_the_next_decision() -> None:
    fleet = fleet_of("a", "b")
    dispatch(fleet, "a", "r", "xyz", 0.0)
    assert matched_blocks(fleet, "xyzz") == {"a": 3, "b": 0}
    view = view_of(fleet, 0.0)
    assert (view.num_waiting, view.num_running, view.queued_prefill_tokens) == (1, 0, 3 * BLOCK + 3)
    fleet.apply(FirstToken(1.0, A, "r", 0))
    view = view_of(fleet, 1.0)
    assert (view.num_waiting, view.num_running, view.queued_prefill_tokens) == (0, 1, 0)
    assert view.queued_prefill_s == 0.0
    fleet.apply(Finished(2.0, A, "r", 5))
    assert view_of(fleet, 2.0).num_in_flight == 0


def test_a_failure_before_the_first_token_refutes_only_its_own_predictions() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", "r1", "xx", 0.0)
    dispatch(fleet, "a", "r2", "xxyy", 1.0)
    dispatch(fleet, "a", "r3", "xxy", 1.0)
    fleet.apply(Failed(2.0, A, "r2", FailureKind.BROKEN))
    assert matched_blocks(fleet, "xxyy", 2.0) == {"a": 3}
    fleet.apply(Failed(3.0, A, "r3", FailureKind.TIMEOUT))
    assert matched_blocks(fleet, "xxyy", 3.0)["a"] == 3  # r2 had predicted them before: only r2's own went
    fleet.check_invariants()


def test_a_failure_after_the_first_token_keeps_the_computed_prompt() -> None:
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r", "xyz", 0.0)
    fleet.apply(FirstToken(1.0, A, "r"))
    fleet.apply(Failed(2.0, A, "r", FailureKind.CANCELLED))
    assert matched_blocks(fleet, "xyz", 2.0) == {"a": 3}


def test_late_events_after_a_restart_are_ignored() -> None:
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r", "xyz", 0.0)
    fleet.apply(Restarted(1.0, A, "two"))
    assert matched_blocks(fleet, "xyz", 1.0) == {"a": 0}
    for late in (FirstToken(2.0, A, "r", 0), Finished(3.0, A, "r", 9), Failed(3.0, A, "r", FailureKind.BROKEN)):
        fleet.apply(late)
        fleet.check_invariants()
    view = view_of(fleet, 3.0)
    assert (view.incarnation, view.num_in_flight, view.queued_prefill_tokens) == ("two", 0, 0)


def test_a_late_event_of_a_failed_over_attempt_does_not_end_the_new_one() -> None:
    fleet = fleet_of("a", "b")
    dispatch(fleet, "a", "r", "x", 0.0)
    fleet.apply(Failed(1.0, A, "r", FailureKind.TIMEOUT))
    dispatch(fleet, "b", "r", "x", 1.0)
    fleet.apply(Finished(2.0, A, "r", 3))
    assert view_of(fleet, 2.0, "b").num_in_flight == 1


def test_joining_again_as_the_same_process_keeps_what_is_known() -> None:
    fleet = fleet_of("a")
    serve(fleet, "a", "r", "xyz", 0.0)
    fleet.apply(joined("a", 500, 1.0))
    assert matched_blocks(fleet, "xyz", 1.0) == {"a": 3}
    fleet.apply(joined("a", 500, 2.0, incarnation="two"))
    assert matched_blocks(fleet, "xyz", 2.0) == {"a": 0}


def test_events_of_unknown_replicas_are_ignored() -> None:
    fleet = fleet_of("a")
    ghost = ReplicaId("ghost")
    fleet.apply(Dispatched(0.0, ghost, "r", chain("x"), 0))
    fleet.apply(StatsReported(0.0, ghost, 1, 1, 0.1))
    fleet.apply(BlocksStored(0.0, ghost, keys("x")))
    assert fleet.num_leases() == 0
    assert fleet.replica_ids() == (A,)


def test_the_work_clock_ages_with_the_head_and_resynchronises_at_a_first_token() -> None:
    fleet = fleet_of("a")
    for i in range(3):
        dispatch(fleet, "a", f"r{i}", "xyz"[i] * 100, 0.0)
    each = view_of(fleet, 0.0).queued_prefill_s / 3
    assert each > 0.0
    assert view_of(fleet, each / 2).queued_prefill_s == pytest.approx(2.5 * each)
    fleet.apply(FirstToken(each / 2, A, "r0", 0))
    # one observation has rescaled the rates of later requests, not the predictions for those that wait
    assert view_of(fleet, each / 2).queued_prefill_s == pytest.approx(2 * each)


def test_a_head_that_overruns_makes_the_replica_look_worse_by_the_second() -> None:
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r", "xyz", 0.0)
    assert view_of(fleet, 20.0).queued_prefill_s > view_of(fleet, 10.0).queued_prefill_s > 1.0


def test_an_unstreamed_request_counts_as_running_once_its_prefill_should_be_over() -> None:
    fleet = fleet_of("a")
    fleet.apply(Dispatched(0.0, A, "r", chain("xyz"), 0, streamed=False))
    assert view_of(fleet, 0.0).num_waiting == 1
    view = view_of(fleet, 20.0)
    assert (view.num_waiting, view.num_running, view.queued_prefill_s) == (0, 1, 0.0)
    fleet.apply(Finished(20.0, A, "r", 100, 0))
    assert view_of(fleet, 20.0).rates.num_observations == 0, "its end says nothing about the speed of prefill"
    assert matched_blocks(fleet, "xyz", 20.0) == {"a": 3}


def test_a_report_adds_what_came_from_elsewhere_and_counts_nothing_twice() -> None:
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r1", "x", 0.0)
    own = chain("x").num_tokens
    fleet.apply(StatsReported(1.0, A, 2, 3, 0.25, queued_prefill_tokens=own + 10_000))
    view = view_of(fleet, 1.0)
    assert (view.num_waiting, view.num_running) == (3, 2)
    assert view.queued_prefill_tokens == own + 10_000
    assert view.kv_usage == 0.25
    dispatch(fleet, "a", "r2", "y", 1.0)  # newer than the report: on top of it
    assert view_of(fleet, 1.0).queued_prefill_tokens == 2 * own + 10_000
    fleet.apply(FirstToken(1.0, A, "r1"))
    assert view_of(fleet, 1.0).queued_prefill_tokens == own + 10_000
    fleet.apply(StatsReported(2.0, A, 1, 1, 0.1, queued_prefill_tokens=own))  # elsewhere has ended; both are ours
    view = view_of(fleet, 2.0)
    assert (view.num_waiting, view.num_running, view.queued_prefill_tokens) == (1, 1, own)


def test_a_report_below_our_own_count_loses_none_of_our_dispatches() -> None:
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r", "xyz", 0.9)
    fleet.apply(StatsReported(1.0, A, 0, 0, 0.0, queued_prefill_tokens=0))  # taken before r arrived
    view = view_of(fleet, 1.0)
    assert (view.num_waiting, view.queued_prefill_tokens) == (1, chain("xyz").num_tokens)


def test_foreign_prefill_drains_with_time_and_an_old_report_is_forgotten() -> None:
    fleet = fleet_of("a")
    fleet.apply(StatsReported(0.0, A, 1, 4, 0.5, queued_prefill_tokens=10_000))
    full = view_of(fleet, 0.0).queued_prefill_s
    assert view_of(fleet, full / 2).queued_prefill_s == pytest.approx(full / 2)
    view = view_of(fleet, 1000.0)
    assert (view.num_in_flight, view.queued_prefill_s, view.kv_usage) == (0, 0.0, 0.0)


def test_a_replica_with_kv_events_is_believed() -> None:
    fleet = fleet_of("a", config=FleetConfig(prediction_ttl_s=10.0))
    fleet.apply(BlocksStored(0.0, A, keys("xyxy")))
    assert matched_blocks(fleet, "xyxy", 0.0) == {"a": 4}
    fleet.apply(BlocksRemoved(1.0, A, (keys("xyxy")[2],)))
    assert matched_blocks(fleet, "xyxy", 1.0) == {"a": 2}
    fleet.apply(BlocksStored(2.0, A, keys("xyxy")[2:3]))
    assert matched_blocks(fleet, "xyxy", 2.0) == {"a": 4}
    fleet.apply(BlocksCleared(3.0, A))
    assert matched_blocks(fleet, "xyxy", 3.0) == {"a": 0}


def test_a_prediction_that_no_event_confirms_expires_after_the_request() -> None:
    fleet = fleet_of("a", config=FleetConfig(prediction_ttl_s=10.0))
    fleet.apply(BlocksStored(0.0, A, keys("x")))
    serve(fleet, "a", "r", "xyzz", 1.0)
    fleet.apply(BlocksStored(2.0, A, keys("xy")))
    assert matched_blocks(fleet, "xyzz", 5.0) == {"a": 4}
    assert matched_blocks(fleet, "xyzz", 50.0) == {"a": 2}


def test_a_lost_feed_leaves_a_mirror_by_predictions() -> None:
    fleet = fleet_of("a", num_blocks=16)
    fleet.apply(BlocksStored(0.0, A, keys("xy")))
    fleet.apply(FeedLost(1.0, A))
    serve(fleet, "a", "r", "xyzz", 1.0)
    assert matched_blocks(fleet, "xyzz", 50.0) == {"a": 4}, "nothing expires without a feed that could confirm"
    assert not fleet.stats(A).authoritative
    fleet.apply(BlocksCleared(60.0, A))
    assert fleet.stats(A).authoritative


def test_a_replica_that_never_reuses_anything_stops_promising() -> None:
    fleet = fleet_of("a")
    for i in range(12):
        serve(fleet, "a", f"r{i}", "xyzxyzxyz", float(i), cached=0)
    assert matched_blocks(fleet, "xyzxyzxyz", 20.0)["a"] <= 1
    for i in range(30):
        serve(fleet, "a", f"s{i}", "xyzxyzxyz", 20.0 + i, cached=9 * BLOCK)
    assert matched_blocks(fleet, "xyzxyzxyz", 60.0) == {"a": 9}


def test_more_than_whole_blocks_is_no_reason_to_doubt() -> None:
    """An engine that copies parts of blocks reuses more than the router can expect; one that doesn't, no more."""
    fleet = fleet_of("a", num_blocks=100)
    serve(fleet, "a", "first", "xyzz", 0.0, cached=0)
    for i in range(12):
        serve(fleet, "a", f"r{i}", "xyzz", 1.0 + i, cached=3 * BLOCK + BLOCK - 1)
        serve(fleet, "a", f"s{i}", f"xy{chr(65 + i)}a", 1.0 + i, cached=2 * BLOCK + 3)
        assert fleet.stats(A).trust == 1.0
    assert fleet.stats(A).index_capacity_blocks == 100
    assert matched_blocks(fleet, "xyzz", 20.0) == {"a": 4}


def test_shortfalls_shrink_the_mirror_down_to_half_of_what_the_replica_told() -> None:
    fleet = fleet_of("a", num_blocks=100)
    for i in range(60):
        serve(fleet, "a", f"r{i}", "x" * 20, float(i), cached=0)
    assert fleet.stats(A).index_capacity_blocks == 50
    for i in range(600):
        serve(fleet, "a", f"s{i}", "x" * 20, 100.0 + i, cached=20 * BLOCK)
    assert fleet.stats(A).index_capacity_blocks == 100


def test_a_prefix_still_being_computed_is_no_promise_to_break() -> None:
    """Two requests of one prefix in the same step: neither can reuse the other's blocks."""
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r1", "x" * 20, 0.0)
    dispatch(fleet, "a", "r2", "x" * 20, 0.0, matched=20 * BLOCK)
    fleet.apply(FirstToken(1.0, A, "r1", 0))
    fleet.apply(FirstToken(1.0, A, "r2", 0))
    assert fleet.stats(A).trust == 1.0


def test_dispatching_a_live_request_again_is_a_bug() -> None:
    fleet = fleet_of("a")
    dispatch(fleet, "a", "r", "x", 0.0)
    with pytest.raises(AssertionError, match="dispatched twice"):
        dispatch(fleet, "a", "r", "x", 1.0)


def test_sequence_counts_decisions_and_a_snapshot_changes_nothing() -> None:
    fleet = fleet_of("a")
    first = fleet.snapshot(request("r", "x"), 0.0)
    assert fleet.snapshot(request("r", "x"), 0.0) == first
    dispatch(fleet, "a", "r", "x", 0.0)
    assert fleet.snapshot(request("s", "x"), 0.0).sequence == first.sequence + 1


def test_what_would_be_overtaken_is_seen_where_the_shortest_are_served_first() -> None:
    fleet = fleet_of("a")
    fleet.apply(
        Joined(0.0, ReplicaId("b"), "one", frozenset({MODEL}), KeySpace("tokens/16"), BLOCK, 1000, step_tokens=16)
    )
    for name in "ab":
        dispatch(fleet, name, name, "xyz" * 100, 0.0)
    ordered, plain = (view_of(fleet, 0.0, name) for name in "ba")
    assert ordered.queued_prefill_s == plain.queued_prefill_s > 0.0
    assert 0.0 == plain.overtaken_s < ordered.overtaken_s < ordered.queued_prefill_s
    fleet.apply(Restarted(1.0, ReplicaId("b"), "two"))
    dispatch(fleet, "b", "c", "xyz" * 100, 1.0)
    assert view_of(fleet, 1.0, "b").overtaken_s > 0.0, "the new process is as the old one was"
    fleet.check_invariants()
