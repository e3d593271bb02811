"""Preble's E2: when it exploits, and what exploring costs."""

from __future__ import annotations

import pytest

from policies.types import ReplicaId
from tests.policies.peers.support import Driven
from tests.policies.support import RATES, view


@pytest.mark.parametrize(
    ("matched_blocks", "reason"),
    # a prompt of 6 blocks and 3 tokens, 99: 48 are less than half, 64 more
    [(0, "explore"), (3, "explore"), (4, "warm"), (6, "warm")],
)
def test_it_exploits_when_more_is_matched_than_not(matched_blocks: int, reason: str) -> None:
    driven = Driven("preble", "a", "b")
    driven.serve("x" * matched_blocks + "y" * (6 - matched_blocks), to="a")
    decision = driven.ask("x" * 6)
    assert decision.reason == reason
    if reason == "warm":
        assert decision.replica_id == "a"


def test_of_several_longest_matches_the_least_loaded() -> None:
    driven = Driven("preble", "a", "b", "c")
    for name in "ab":
        driven.serve("x" * 6, to=name)
    views = (view("a", num_running=3), view("b", num_running=1), view("c"))
    assert driven.choose("x" * 6, *views).replica_id == "b"


def test_exploring_adds_load_eviction_and_prefill() -> None:
    driven = Driven("preble", "a", "b", num_blocks=8)
    driven.send("p" * 5, to="a")
    driven.send("q" * 4, to="a")  # nine blocks where eight fit: the tail of p went
    views = (view("a", num_tokens=99, num_waiting=2), view("b", num_tokens=99))
    a, b = driven.choose("z" * 6, *views).scores
    assert b.terms == {"load": 0.0, "eviction": 0.0, "prefill": pytest.approx(RATES.prefill_s(99, 0))}
    sent = RATES.prefill_s(83, 0) + RATES.prefill_s(67, 0)
    assert a.terms["load"] == pytest.approx(sent + 2 * 200.0 * RATES.decode_step_s)
    # six new blocks where none is free push out six: four of p and two of q, each used by one of two requests
    assert a.terms["eviction"] == pytest.approx(6 * 0.5 * 16 * RATES.linear_s)


def test_only_the_part_that_is_not_held_costs_prefill() -> None:
    driven = Driven("preble", "a", "b")
    driven.serve("xx", to="a")
    a, b = driven.choose("x" * 6, view("a", num_tokens=99), view("b", num_tokens=99)).scores
    assert a.terms["prefill"] == pytest.approx(RATES.prefill_s(99 - 32, 32))
    assert b.terms["prefill"] == pytest.approx(RATES.prefill_s(99, 0))


def test_history_is_taken_for_backlog_until_the_window_is_over() -> None:
    """The known weakness: everything is finished, and a still looks busy for three minutes."""
    driven = Driven("preble", "a", "b")
    for i in range(5):
        driven.serve(chr(400 + i) * 30, float(i), to="a")
    assert driven.ask("new", 100.0).replica_id == "b"
    driven.serve("x", 190.0, to="b")
    assert driven.ask("new", 190.0).replica_id == "a"
    driven.policy.check_invariants()  # type: ignore[attr-defined]


def test_its_tree_is_as_large_as_the_replica() -> None:
    driven = Driven("preble", "a", "b", num_blocks=8)
    driven.serve("x" * 6, 0.0, to="a")
    driven.serve("y" * 6, 1.0, to="a")
    assert driven.ask("x" * 6, 2.0).reason == "explore"
    assert driven.ask("y" * 6, 2.0).replica_id == ReplicaId("a")
