"""Rules that hash the head of the prompt: bounded hash and DualMap."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.peers.dualmap import DualMapConfig, HotPrefixes
from policies.peers.ring import clockwise, ring_of
from policies.types import PrefixChain, ReplicaId, ReplicaView, RouteRequest
from tests.policies.peers.support import Driven, choose_among
from tests.policies.support import SPACE, keys, view

NAMES = ("a", "b", "c", "d")
LETTERS = [chr(300 + i) for i in range(400)]


def idle(**loads: int) -> tuple[ReplicaView, ...]:
    return tuple(view(name, num_running=loads.get(name, 0)) for name in NAMES)


def test_a_ring_gives_each_replica_a_fair_share_and_keeps_most_of_it_when_one_leaves() -> None:
    four = ring_of(tuple(map(ReplicaId, NAMES)), 256)
    three = ring_of(tuple(map(ReplicaId, "abd")), 256)
    spots = [i * (1 << 64) // 4001 for i in range(4000)]
    before = [next(clockwise(four, at)) for at in spots]
    after = [next(clockwise(three, at)) for at in spots]
    assert min(Counter(before).values()) > 700
    assert all(was == now for was, now in zip(before, after, strict=True) if was != "c")
    assert sorted(clockwise(four, spots[7])) == list(NAMES)


def test_bounded_hash_goes_by_the_first_block_alone() -> None:
    driven = Driven("bounded_hash", *NAMES)
    for letter in LETTERS[:20]:
        homes = {driven.choose(letter + rest, *idle()).replica_id for rest in ("", "x", "yz")}
        assert len(homes) == 1
    assert len({driven.choose(letter, *idle()).replica_id for letter in LETTERS}) == 4


def test_bounded_hash_walks_on_round_the_ring_past_the_full() -> None:
    driven = Driven("bounded_hash", *NAMES)
    home = driven.choose("x", *idle()).replica_id
    # 4 running; with this one 5, mean 1.25, bound 1.5625: whoever runs one already would have two
    full = driven.choose("x", *idle(**{home: 4}))
    assert full.replica_id != home
    assert full.reason == "bounded"
    even = dict.fromkeys(NAMES, 4)
    # 16 running: mean 17 / 4, bound 5.3125: five are allowed
    assert driven.choose("x", *idle(**even)).replica_id == home
    # 19 running: bound 6.25; the home runs 6 and may not have seven
    assert driven.choose("x", *idle(**(even | {home: 7}))).replica_id != home


def test_bounded_hash_with_nothing_to_hash_takes_the_least_loaded() -> None:
    driven = Driven("bounded_hash", *NAMES)
    short = RouteRequest("probe", "m", 5, {SPACE: PrefixChain((), 16, 5)})
    assert choose_among(driven, short, *idle(a=1, b=1, d=1)).replica_id == "c"


def test_a_universal_first_block_kills_bounded_hash() -> None:
    """The known weakness: one system prompt for all, and all go to one place; only the bound spreads them."""
    driven = Driven("bounded_hash", *NAMES)
    assert len({driven.choose("s" + letter, *idle()).replica_id for letter in LETTERS}) == 1


@pytest.mark.parametrize("name", ["bounded_hash", "dualmap"])
def test_hashing_needs_no_memory_of_what_was_sent(name: str) -> None:
    first, second = Driven(name, *NAMES), Driven(name, *NAMES, seed=5)
    for letter in LETTERS[:50]:
        views = tuple(view(n, matched_tokens=i) for i, n in enumerate(NAMES))
        assert first.choose(letter, *views).replica_id == second.choose(letter, *views).replica_id


def test_dualmap_has_two_candidates_and_takes_the_warmer() -> None:
    driven = Driven("dualmap", *NAMES)
    decision = driven.choose("x", *idle())
    first, second = [score.replica_id for score in decision.scores]
    assert first != second
    views = tuple(view(n, matched_tokens=480 if n == second else 0, num_running=9 if n == second else 0) for n in NAMES)
    assert driven.choose("x", *views).replica_id == second
    # equally warm: the one with more room
    views = tuple(view(n, kv_usage=0.5 if n == first else 0.1) for n in NAMES)
    assert driven.choose("x", *views).replica_id == second


def test_dualmap_leaves_the_warmer_when_it_would_miss_the_objective() -> None:
    driven = Driven("dualmap:ttft_objective_s=5", *NAMES)
    warm, other = [score.replica_id for score in driven.choose("x", *idle()).scores]

    def views(queue_s: float, other_s: float = 0.0) -> tuple[ReplicaView, ...]:
        queues = {warm: queue_s, other: other_s}
        return tuple(
            view(n, matched_tokens=480 if n == warm else 0, queued_prefill_s=queues.get(n, 0.0)) for n in NAMES
        )

    assert driven.choose("x", *views(4.9)).replica_id == warm
    late = driven.choose("x", *views(5.0))
    assert (late.replica_id, late.reason) == (other, "balance")
    # both late: the sooner
    assert driven.choose("x", *views(6.0, 7.0)).replica_id == warm


def test_dualmap_has_only_two_choices() -> None:
    """The known weakness: its two candidates drown while two others idle."""
    driven = Driven("dualmap", *NAMES)
    candidates = {score.replica_id for score in driven.choose("x", *idle()).scores}
    drowned = tuple(view(n, queued_prefill_s=100.0 if n in candidates else 0.0) for n in NAMES)
    assert driven.choose("x", *drowned).replica_id in candidates


def test_dualmap_tells_prompts_behind_a_hot_prefix_apart() -> None:
    driven = Driven("dualmap", *NAMES)

    def homes() -> set[ReplicaId]:
        return {s.replica_id for letter in LETTERS for s in driven.choose("s" + letter, *idle()).scores}

    assert len(homes()) == 2
    for letter in LETTERS[:30]:
        driven.send("s" + letter + "z", to="a")
    assert len(homes()) == 4


def test_a_head_grows_at_the_hot_share_and_shrinks_when_it_has_cooled() -> None:
    hot = HotPrefixes(DualMapConfig(window=100, min_samples=20))
    for letter in LETTERS[:93]:
        hot.add(keys(letter))
    for _ in range(6):
        hot.add(keys("sx"))
    assert hot.depth(keys("sxy")) == 1  # 6 of 99
    hot.add(keys("sx"))
    hot.check_invariants()
    assert hot.depth(keys("sxy")) == 2  # 7 of 100
    for letter in LETTERS[100:198]:
        hot.add(keys(letter))
        hot.check_invariants()
    assert hot.depth(keys("sxy")) == 2  # 2 of 100
    hot.add(keys(LETTERS[200]))
    assert hot.depth(keys("sxy")) == 1  # 1 of 100
