"""Rules that keep a tree of what they sent where: SGLang's approximate tree and production-stack's trie."""

from __future__ import annotations

import pytest

from policies.events import Left, Restarted
from policies.types import ReplicaId
from tests.policies.peers.support import Driven
from tests.policies.support import view

LONG = "x" * 10


@pytest.mark.parametrize(
    ("matched_blocks", "expected"),
    # prompts of 10 blocks and 3 tokens: 163 tokens; the longest match must exceed 0.3 of them, 48.9 tokens
    [(3, ("b", "cold")), (4, ("a", "warm")), (10, ("a", "warm"))],
)
def test_the_longest_match_wins_above_three_tenths_else_the_smallest_tree(
    matched_blocks: int, expected: tuple[str, str]
) -> None:
    driven = Driven("approximate_tree", "a", "b")
    driven.serve(LONG[:matched_blocks] + "y" * (10 - matched_blocks), to="a")
    decision = driven.ask(LONG)
    assert (decision.replica_id, decision.reason) == expected


def test_the_threshold_is_a_setting() -> None:
    driven = Driven("approximate_tree:cache_threshold=0.5", "a", "b")
    driven.serve("xxxxx" + "y" * 5, to="a")
    assert driven.ask(LONG).reason == "cold"  # 80 of 163 tokens
    driven.serve("xxxxxx" + "y" * 4, to="a")
    assert driven.ask(LONG).reason == "warm"


@pytest.mark.parametrize(
    ("most", "fewest", "trips"),
    [(64, 0, False), (65, 0, True), (195, 130, False), (196, 130, True), (200, 134, False), (202, 134, True)],
)
def test_the_gate_needs_both_a_gap_above_64_and_a_ratio_above_one_and_a_half(
    most: int, fewest: int, trips: bool
) -> None:
    driven = Driven("approximate_tree", "a", "b")
    driven.serve(LONG, to="a")
    decision = driven.choose(LONG, view("a", num_running=most), view("b", num_running=fewest))
    assert (decision.reason == "imbalance", decision.replica_id) == (trips, "b" if trips else "a")


def test_the_tree_learns_even_while_the_gate_is_tripped() -> None:
    driven = Driven("approximate_tree", "a", "b")
    for _ in range(66):
        driven.send("y", to="a")
    driven.send(LONG)
    assert driven.sent_to == "b"
    assert driven.choose(LONG, view("a"), view("b")).replica_id == "b"


def test_a_prefix_sticks_without_bound_below_the_gate() -> None:
    """The known weakness: counts stand for load. One replica has 64 long prompts waiting, the others none."""
    driven = Driven("approximate_tree", "a", "b", "c")
    for _ in range(64):
        driven.send(LONG, to="a")
    assert driven.ask(LONG).replica_id == "a"
    driven.send(LONG, to="a")  # and with one more all locality is gone
    assert driven.ask(LONG).reason == "imbalance"


def test_the_smallest_tree_is_the_one_with_fewest_tokens_not_requests() -> None:
    driven = Driven("approximate_tree", "a", "b")
    driven.serve("x" * 9, to="a")
    for letter in "pqrs":
        driven.serve(letter, to="b")
    assert driven.ask("new").replica_id == "b"
    least = Driven("approximate_tree:below_threshold=load", "a", "b")
    least.serve("x" * 9, to="a")
    least.send("p", to="b")
    assert least.ask("new").replica_id == "a"


def test_leaves_used_longest_ago_go_at_the_interval() -> None:
    # room for 4 blocks of 16 tokens
    driven = Driven("approximate_tree:max_tree_tokens=64:eviction_interval_s=120", "a", "b")
    driven.serve("xyz", 0.0, to="a")
    driven.serve("xpq", 1.0, to="a")
    assert driven.ask("xyz", 2.0).reason == "warm"  # above its size until the interval is over
    driven.serve("xpq", 121.0, to="a")
    assert driven.ask("xpq", 121.0).reason == "warm"
    assert driven.ask("xyz", 121.0).reason == "warm"  # x and y are left: 32 of 51 tokens
    assert driven.ask("yyz", 121.0).reason == "cold"
    driven.serve("mno", 242.0, to="a")  # m, n, o and x are the youngest four
    matched = [driven.ask(path, 242.0).scores[0].terms["matched"] for path in ("mno", "xyz", "xpq")]
    assert matched == [48, 16, 16]


@pytest.mark.parametrize("name", ["approximate_tree", "production_stack"])
def test_what_a_process_held_goes_with_it(name: str) -> None:
    driven = Driven(name, "a", "b")
    driven.serve(LONG, to="a")
    assert driven.ask(LONG).reason == "warm"
    driven.apply(Restarted(1.0, ReplicaId("a"), "two"))
    assert driven.ask(LONG, 1.0).reason == "cold"
    driven.serve(LONG, 2.0, to="a")
    driven.apply(Left(3.0, ReplicaId("a")))
    assert driven.ask(LONG, 3.0).reason == "only_replica"
    driven.policy.check_invariants()  # type: ignore[attr-defined]


def test_a_tie_between_holders_is_settled_by_the_prefix_and_stays() -> None:
    driven = Driven("approximate_tree", "a", "b", "c")
    homes = set()
    for i in range(40):
        path = chr(400 + i) * 4
        for name in "abc":
            driven.serve(path, to=name)
        picked = {driven.ask(path).replica_id for _ in range(5)}
        assert len(picked) == 1
        homes |= picked
    assert homes == {"a", "b", "c"}


def test_the_trie_takes_the_longest_match_whatever_the_load() -> None:
    """production-stack, and its known weakness."""
    driven = Driven("production_stack", "a", "b", "c")
    driven.serve("xy", to="a")
    driven.serve("x", to="b")
    for _ in range(100):
        driven.send("q", to="a")
    decision = driven.ask("xyz")
    assert (decision.replica_id, decision.reason) == ("a", "warm")
    # among several at the end of the match, chance: both hold x, only those two
    driven.serve("xq", to="c")
    assert {driven.ask("xrr").replica_id for _ in range(60)} == {"a", "b", "c"}
    assert {driven.ask("nothing").replica_id for _ in range(60)} == {"a", "b", "c"}


def test_the_trie_promises_what_the_engine_has_long_evicted() -> None:
    driven = Driven("production_stack", "a", "b", num_blocks=4)
    driven.serve("xyz", 0.0, to="a")
    for i in range(50):
        driven.serve(chr(400 + i) * 4, float(i + 1), to="a")
    decision = driven.ask("xyz", 100.0)
    assert (decision.replica_id, decision.reason, decision.matched_tokens) == ("a", "warm", 0)


def test_short_matches_may_count_for_nothing() -> None:
    driven = Driven("production_stack:min_match_tokens=48", "a", "b")
    driven.serve("xyz", to="a")
    assert driven.ask("xyq").reason == "cold"
    assert driven.ask("xyz").reason == "warm"
