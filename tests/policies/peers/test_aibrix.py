"""AIBrix's prefix cache: the gate, the bound of one deviation, and its table of blocks."""

from __future__ import annotations

import pytest

from policies.peers.aibrix import BlockTable
from policies.types import ReplicaId
from tests.policies.peers.support import Driven
from tests.policies.support import keys, view

A, B = ReplicaId("a"), ReplicaId("b")
BOTH = {A, B}


@pytest.mark.parametrize(("most", "expected"), [(8, "warm"), (9, "imbalance")])
def test_the_gate_trips_above_eight(most: int, expected: str) -> None:
    driven = Driven("aibrix", "a", "b", "c")
    driven.serve("xyz", to="a")
    # mean and deviation let a have it: three of four replicas are as busy as a
    views = (view("a", num_running=most), view("b", num_running=most), view("c", num_running=0))
    decision = driven.choose("xyz", *views)
    assert (decision.reason, decision.replica_id) == (expected, "a" if expected == "warm" else "c")


def test_the_longest_match_within_one_deviation_of_the_mean() -> None:
    driven = Driven("aibrix", "a", "b", "c", "d")
    driven.serve("xyz", to="a")
    driven.serve("xy", to="b")
    # 6, 2, 2, 2: mean 3, deviation sqrt(12 / 4) = 1.732; a is above 4.732, b is not
    views = (view("a", num_running=6), view("b", num_running=2), view("c", num_running=2), view("d", num_running=2))
    decision = driven.choose("xyz", *views)
    assert (decision.replica_id, decision.reason) == ("b", "warm")
    assert decision.scores[0].terms["bound"] == pytest.approx(3 + 3**0.5)
    # 4, 2, 2, 2: mean 2.5, deviation 0.866; a is still above; without b's match nobody is left
    only = Driven("aibrix", "a", "b", "c", "d")
    only.serve("xyz", to="a")
    views = (view("a", num_running=4), view("b", num_running=2), view("c", num_running=1), view("d", num_running=2))
    decision = only.choose("xyz", *views)
    assert (decision.replica_id, decision.reason) == ("c", "balance")


def test_equal_matches_go_to_the_fewer_requests() -> None:
    driven = Driven("aibrix", "a", "b", "c")
    driven.serve("xyz", to="a")
    driven.serve("xyq", to="b")
    views = (view("a", num_running=3), view("b", num_running=2), view("c", num_running=2))
    assert {driven.choose("xyr", *views).replica_id for _ in range(20)} == {"b"}


def test_counts_stand_for_load() -> None:
    """The known weakness: a has three requests of a hundred thousand tokens before it, b three tiny ones."""
    driven = Driven("aibrix", "a", "b")
    driven.serve("xyz", to="a")
    drowned = view("a", num_waiting=3, queued_prefill_tokens=300_000, queued_prefill_s=60.0)
    assert driven.choose("xyz", drowned, view("b", num_waiting=3, queued_prefill_tokens=30)).replica_id == "a"


def test_the_later_gate_still_looks_for_a_match_among_the_idlest() -> None:
    driven = Driven("aibrix:relative_gate=yes", "a", "b", "c")
    driven.serve("xyz", to="a")
    driven.serve("xy", to="c")
    # 13, 0, 0: 13 > 2 (4.33 + 1) and 13 apart
    decision = driven.choose("xyz", view("a", num_running=13), view("b"), view("c"))
    assert (decision.replica_id, decision.reason) == ("c", "imbalance")


def test_the_table_matches_each_replica_as_far_as_it_was_sent() -> None:
    table = BlockTable(max_tokens=1000, ttl_s=100.0)
    table.add(keys("xyz"), 16, A, 0.0)
    table.add(keys("xq"), 16, B, 1.0)
    assert table.match(keys("xyzz"), BOTH, 2.0) == {A: 3, B: 1}
    assert table.match(keys("xyzz"), {B}, 2.0) == {B: 1}
    assert table.match(keys("pq"), BOTH, 2.0) == {}
    table.forget(A)
    assert table.match(keys("xyz"), BOTH, 2.0) == {B: 1}


def test_a_root_goes_before_its_tail_which_is_then_out_of_reach() -> None:
    table = BlockTable(max_tokens=64, ttl_s=100.0)
    table.add(keys("xyz"), 16, A, 0.0)
    table.add(keys("pq"), 16, A, 1.0)  # five blocks, room for four: x is the oldest
    table.check_invariants()
    assert len(table) == 4
    assert table.match(keys("xyz"), BOTH, 1.0) == {}


def test_blocks_go_when_unused_for_long() -> None:
    table = BlockTable(max_tokens=1000, ttl_s=100.0)
    table.add(keys("xyz"), 16, A, 0.0)
    table.add(keys("xy"), 16, A, 60.0)
    assert table.match(keys("xyz"), BOTH, 99.0) == {A: 3}
    assert table.match(keys("xyz"), BOTH, 100.0) == {A: 2}
    table.add(keys("p"), 16, A, 200.0)
    assert len(table) == 1
