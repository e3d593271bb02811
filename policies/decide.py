"""What every rule's decision has in common: its seconds, its reason, and ties broken by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from policies.types import Decision, FleetSnapshot, ReplicaView, Score

_T = TypeVar("_T")


def own_prefill_s(view: ReplicaView) -> float:
    """Seconds that this request's own uncached tokens take on the replica."""
    return view.rates.prefill_s(view.num_tokens - view.matched_tokens, view.matched_tokens)


def reason_of(chosen: ReplicaView, fleet: FleetSnapshot) -> str:
    """The label of a decision by what it means for the cache: only_replica, cold (nobody holds a block), warm (the
    longest match won) or balance (a longer match lost to load)."""
    if len(fleet.replicas) == 1:
        return "only_replica"
    longest = max(view.matched_tokens for view in fleet.replicas)
    if not longest:
        return "cold"
    return "warm" if chosen.matched_tokens == longest else "balance"


def decision(
    policy: str, chosen: ReplicaView, fleet: FleetSnapshot, reason: str, scores: tuple[Score, ...] = ()
) -> Decision:
    """`chosen` as a Decision; with one candidate the reason is always `only_replica`."""
    return Decision(
        replica_id=chosen.replica_id,
        policy=policy,
        reason="only_replica" if len(fleet.replicas) == 1 else reason,
        matched_tokens=chosen.matched_tokens,
        num_tokens=chosen.num_tokens,
        expected_ttft_s=chosen.queued_prefill_s + own_prefill_s(chosen),
        scores=scores,
    )


def pick(items: Sequence[_T], rng: random.Random) -> _T:
    """One of `items` by chance; the rng is asked only when there is a choice."""
    return items[0] if len(items) == 1 else rng.choice(items)


def least(views: Iterable[ReplicaView], key: Callable[[ReplicaView], float], rng: random.Random) -> ReplicaView:
    """The view with the smallest `key`, ties by chance."""
    ties: list[ReplicaView] = []
    smallest = float("inf")
    for view in views:
        value = key(view)
        if value < smallest:
            smallest, ties = value, [view]
        elif value == smallest:
            ties.append(view)
    return pick(ties, rng)


def least_requests(views: Iterable[ReplicaView], rng: random.Random) -> ReplicaView:
    """The fewest requests in flight, ties by chance: what the peers fall back to."""
    return least(views, lambda view: view.num_in_flight, rng)


def scored(
    fleet: FleetSnapshot,
    terms_of: Callable[[ReplicaView], dict[str, float]],
    combine: Callable[[dict[str, float]], float],
) -> tuple[Score, ...]:
    """A Score for every replica: its named terms and what `combine` makes of them."""
    scores = []
    for view in fleet.replicas:
        terms = terms_of(view)
        scores.append(Score(view.replica_id, combine(terms), terms))
    return tuple(scores)


def least_score(fleet: FleetSnapshot, scores: tuple[Score, ...], rng: random.Random) -> ReplicaView:
    """The replica whose total is the smallest, ties by chance."""
    smallest = min(score.total for score in scores)
    return pick([v for v, s in zip(fleet.replicas, scores, strict=True) if s.total == smallest], rng)
