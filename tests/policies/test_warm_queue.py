"""The queue in front of `warm`: who goes first, who has to wait, and for what."""

from __future__ import annotations

import random

import pytest

from policies.events import Dispatched, FirstToken, StatsReported
from policies.fleet import FleetState
from policies.queue import RequestQueue
from policies.types import Decision, ReplicaId, RouteRequest
from policies.warm_queue import WarmQueue, WarmQueueConfig, hold_of
from tests.policies.support import chain, dispatch, fleet_of, request, serve


class Line:
    """A fleet behind a queue, driven as the router does it."""

    def __init__(self, *names: str, max_outstanding_tokens: int = 1000, aging: float = 0.05) -> None:
        self.fleet = fleet_of(*names, num_blocks=10_000)
        self.policy = WarmQueue(WarmQueueConfig(max_outstanding_tokens=max_outstanding_tokens, aging=aging))
        hold = hold_of(self.policy, self.fleet)
        assert hold is not None
        self.queue = RequestQueue(hold)
        self.paths: dict[str, str] = {}
        self.decisions: dict[str, Decision] = {}

    def arrive(self, rid: str, path: str, at: float) -> list[str]:
        self.paths[rid] = path
        self.queue.arrive(request(rid, path), at)
        return self.poll(at)

    def poll(self, at: float) -> list[str]:
        """Who goes now, in order."""
        self._now = at
        polled = self.queue.poll(at, self._dispatch)
        self.queue.check_invariants()
        return [each.request_id for each in polled.ready]

    def _dispatch(self, asked: RouteRequest) -> None:
        decision = self.policy.choose(asked, self.fleet.snapshot(asked, self._now), random.Random(0))
        self.decisions[asked.request_id] = decision
        prompt = chain(self.paths[asked.request_id])
        self.fleet.apply(Dispatched(self._now, decision.replica_id, asked.request_id, prompt, decision.matched_tokens))

    def first_token(self, rid: str, at: float) -> list[str]:
        self.fleet.apply(FirstToken(at, self.decisions[rid].replica_id, rid, 0))
        return self.poll(at)


def test_a_free_replica_takes_anything_and_a_full_one_makes_them_wait() -> None:
    line = Line("a")
    assert line.arrive("long", "x" * 200, 0.0) == ["long"]  # 3,203 tokens, but nothing waits there
    assert line.arrive("short", "y", 0.0) == []
    assert line.first_token("long", 1.0) == ["short"]


def test_as_many_go_as_the_limit_has_room_for() -> None:
    line = Line("a")  # 1,000 tokens
    assert [line.arrive(str(i), chr(300 + i) * 20, 0.0) for i in range(5)] == [["0"], ["1"], ["2"], [], []]


def test_nobody_waits_for_what_will_not_announce_itself() -> None:
    line = Line("a")
    line.fleet.apply(
        StatsReported(0.0, ReplicaId("a"), num_running=0, num_waiting=9, kv_usage=0.5, queued_prefill_tokens=90_000)
    )
    assert line.arrive("beside others'", "x" * 200, 0.0) == ["beside others'"]
    line = Line("a")
    whole = Dispatched(0.0, ReplicaId("a"), "whole", chain("q" * 200), 0, streamed=False)
    line.fleet.apply(whole)
    assert line.arrive("behind a whole answer", "x" * 200, 0.0) == ["behind a whole answer"]
    assert line.arrive("behind a stream", "y" * 200, 0.0) == []


def test_the_shortest_work_goes_first_and_age_counts() -> None:
    line = Line("a", aging=0.05)
    line.arrive("first", "x" * 100, 0.0)
    for rid, blocks, at in (("long", 60, 0.1), ("short", 10, 0.2), ("middle", 30, 0.3)):
        assert line.arrive(rid, chr(400 + blocks) * blocks, at) == []
    assert line.first_token("first", 1.0) == ["short", "middle"]
    # one that came a hundred seconds later is worth five seconds of work less
    line = Line("a", aging=0.05)
    line.arrive("first", "x" * 100, 0.0)
    line.arrive("long", "y" * 60, 0.0)
    line.arrive("late", "z" * 10, 100.0)
    assert line.first_token("first", 100.0)[0] == "long"


def test_work_is_what_is_left_to_compute() -> None:
    line = Line("a")
    serve(line.fleet, "a", "r", "x" * 60, 0.0)
    line.arrive("first", "q" * 100, 1.0)
    line.arrive("cold", "y" * 20, 1.0)
    line.arrive("warm", "x" * 61, 1.0)
    assert line.first_token("first", 1.5) == ["warm", "cold"]


def test_one_that_has_to_wait_does_not_keep_others_from_free_replicas() -> None:
    line = Line("a", "b", max_outstanding_tokens=500)
    serve(line.fleet, "a", "r", "x" * 600, 0.0)
    dispatch(line.fleet, "a", "busy", "p" * 30, 1.0)
    assert line.arrive("warm", "x" * 600 + "y" * 10, 1.0) == []  # computing all of it at b costs more than waiting
    assert line.arrive("cold", "z" * 60, 1.0) == ["cold"]
    assert line.decisions["cold"].replica_id == "b"


def test_the_line_for_a_replica_counts_and_drives_the_next_elsewhere() -> None:
    line = Line("a", "b", max_outstanding_tokens=500)
    serve(line.fleet, "a", "r", "x" * 40, 0.0)
    dispatch(line.fleet, "a", "busy", "p" * 30, 1.0)
    went = [line.arrive(str(i), "x" * 40 + chr(400 + i) * 20, 1.0) for i in range(8)]
    assert went[0] == []
    assert sorted({decision.replica_id for decision in line.decisions.values()}) == ["b"]
    assert len(line.queue) >= 1


def test_the_decision_that_let_it_go_is_the_one_that_is_made() -> None:
    line = Line("a", "b")
    line.arrive("r", "x" * 10, 0.0)
    assert line.policy._placed == {}
    assert line.decisions["r"].policy == "warm_queue"
    # without the hold it decides as warm does
    asked = request("s", "x" * 11)
    decision = line.policy.choose(asked, line.fleet.snapshot(asked, 0.0), random.Random(0))
    assert decision.replica_id in {ReplicaId("a"), ReplicaId("b")}


def test_without_replicas_it_lets_go_so_that_somebody_says_so() -> None:
    fleet = FleetState()
    hold = hold_of(WarmQueue(), fleet)
    assert hold is not None
    queue = RequestQueue(hold)
    queue.arrive(request("r", "x"), 0.0)
    assert [each.request_id for each in queue.poll(0.0).ready] == ["r"]


@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_ever(seed: int) -> None:
    """A long prompt among a stream of short ones that always fill the replica."""
    line, rng = Line("a", max_outstanding_tokens=300, aging=0.05), random.Random(seed)
    line.arrive("first", "x" * 18, 0.0)
    line.arrive("long", "y" * 300, 0.0)
    running, now = ["first"], 0.0
    for i in range(2000):
        now += 0.5
        rid = running.pop(0)
        went = line.first_token(rid, now)
        went += line.arrive(f"s{i}", chr(500 + i) * rng.randrange(10, 18), now)
        running += went
        if "long" in running:
            return
    pytest.fail("the long prompt never went")
