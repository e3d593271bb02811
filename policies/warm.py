"""The default policy: the replica where this request does the least harm, in seconds.

    cost_i = W_i + p_i (1 + tau + L_i) + p_i q_i + kappa d_i + e_i + s_i / 2

W_i  (`queue`)       prefill seconds queued there,
     (`overtaken`)   less those that the request overtakes, where the shortest are served first (work_clock.py)
p_i  (`prefill`)     its own uncached prefill, quadratic attention included
     (`recompute`)   tau p_i: computing a prefix again spreads it over one more replica and evicts something there
     (`later`)       L_i p_i: work done here keeps waiting those who are yet to come before the replica is idle again.
                     In a queue that is about as many as wait there on average over time, L_i: next to none when the
                     replica is mostly idle, several when it drowns, and then spreading a prefix is what drowns it. (A
                     burst that comes to an idle replica finds itself waiting there, and nobody else is to come.)
     (`delay`)       p_i q_i: the q_i requests waiting there all wait p_i longer
     (`shared`)      less what others of its like bear. What the replica would compute again though the best match has
                     it serves those who come with the same prefix, too: about as many as run with it now, n, so this
                     request is charged one part in 1 + n of it. Else a prompt that all begin with stays where it was
                     first, since one more copy costs each of them more than the crowd there does. A session's own
                     prefix has nobody else running, and stays as dear as it is.
d_i  (`decode`)      seconds that its KV adds to the output of those running there: running requests, times expected
                     output tokens, times decode seconds a KV token, times its tokens. And what it overtakes is computed
                     while it decodes, between its own tokens. kappa makes a second between tokens cheaper than a
                     second before the first.
e_i  (`duplicates`)  what caching again pushes out of a full replica: the tokens that the best replica holds and this
                     one doesn't, times the seconds expected to be lost for each evicted there (retouch.py), times
                     2 + the mean queue, as whoever computes it again delays others too. A new prefix has to live
                     somewhere, so only duplicates are charged while all replicas are full.
     (`room`)        while half of the replicas evict nothing of worth, the others are charged for what is new as well:
                     else those that hold a prompt that all begin with would turn their caches over beside empty ones.
                     (One with a little room left is no reason: a fleet that fills evenly would chase the last. Nor is
                     it one where requests usually wait: queues spread sessions by themselves.)
s_i  (`seats`)       seconds until it has one of the seats, where all are taken (load.py); 0 where one is free or a
                     replica doesn't say how many it has. Half of it counts: with all of it more is computed again
                     than the shorter wait is worth.

Replicas that can are asked to serve those who wait by p_i, the shortest first and aged (`order`). Then a long prompt no
longer stands in the way of the short ones, so less is lost by sending them where their prefix is.

W and p together are the expected time to first token. Costs within TIE_SHARE of the least (or TIE_S seconds) are the
same as far as the rates are known; among those the longest match wins, then the fewest requests in flight, then chance.
So a cold fleet spreads by chance and stays spread, because every dispatch raises W where it went.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from policies.decide import own_prefill_s, pick
from policies.types import Decision, FleetSnapshot, LazyScores, ReplicaView, RouteRequest, Score
from policies.warm_config import WarmConfig

NAME: Final = "warm"
TIE_SHARE: Final = 0.05
TIE_S: Final = 0.001
BUSY_QUEUE: Final = 0.5  # requests that wait at a replica; from there on a fleet is busy
MAX_LATER: Final = 8.0  # a queue longer than that says nothing more about what is to come


@dataclass(init=False, slots=True)
class _Weights:
    """What is the same for all replicas: the weights of p, p q, d, and e for duplicates and new blocks, the longest
    match, whether attention's quadratic term counts (1 or 0), the weight of p for each who usually waits, whether what
    would be overtaken is left out of the queue, what it weighs among the decode seconds, the part that others of its
    like bear of what is missing, and the weight of the wait for a seat."""

    own: Final[float]
    delay: Final[float]
    decode: Final[float]
    price: Final[float]
    room: Final[float]
    longest: Final[int]
    quadratic: Final[float]
    later: Final[float]
    overtake: Final[float]
    beside: Final[float]
    shared: Final[float]
    seats: Final[float]

    def __init__(
        self, own: float, delay: float, decode: float, price: float, room: float, longest: int, quadratic: float,
        later: float, overtake: float, beside: float, shared: float, seats: float,
    ) -> None:  # fmt: skip
        self.own = own
        self.delay = delay
        self.decode = decode
        self.price = price
        self.room = room
        self.longest = longest
        self.quadratic = quadratic
        self.later = later
        self.overtake = overtake
        self.beside = beside
        self.shared = shared
        self.seats = seats


class Warm:
    """Least expected seconds of marginal harm."""

    def __init__(self, config: WarmConfig | None = None, name: str = NAME) -> None:
        self._config = config or WarmConfig()
        self.name = name

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """See the module's header. `reason`: only_replica, cold (nobody holds a block), warm (the longest match won)
        or balance (a longer match lost to load)."""
        views = fleet.replicas
        weights = self._weights(request, fleet)
        costs = self._costs(views, weights)
        least = min(costs)
        margin = TIE_SHARE * least
        bound = least + (margin if margin > TIE_S else TIE_S)
        near = []
        for i in range(len(costs)):
            if costs[i] <= bound:
                near.append(views[i])
        chosen = near[0] if len(near) == 1 else _break_tie(near, rng)
        work_s = own_prefill_s(chosen)
        return Decision(
            chosen.replica_id,
            self.name,
            _reason(chosen, weights.longest, len(views)),
            chosen.matched_tokens,
            chosen.num_tokens,
            chosen.queued_prefill_s - weights.overtake * chosen.overtaken_s + work_s,
            LazyScores(lambda: self._scores(views, weights)),
            work_s if self._config.order else None,
        )

    def _costs(self, views: tuple[ReplicaView, ...], weights: _Weights) -> list[float]:
        """The total of every replica. The same sum as in _scores, without names: this is the hot path."""
        own, delay, decode, longest = weights.own, weights.delay, weights.decode, weights.longest
        overtake, later, shared = weights.overtake - weights.beside, weights.later, weights.shared
        costs = []
        for view in views:
            rates, num_tokens, matched = view.rates, view.num_tokens, view.matched_tokens
            uncached = num_tokens - matched
            attention = weights.quadratic * rates.quadratic_s * (matched + uncached / 2)
            prefill = rates.base_s + uncached * (rates.linear_s + attention)
            queue = view.typical_queue if view.typical_queue < MAX_LATER else MAX_LATER
            waiting = delay * view.num_waiting + later * queue
            if shared and matched < longest:
                prefill -= shared * _missing_s(view, weights)
            cost = view.queued_prefill_s - overtake * view.overtaken_s + prefill * (own + waiting)
            if view.seat_wait_s:
                cost += weights.seats * view.seat_wait_s
            if view.num_running:
                cost += decode * view.num_running * rates.decode_kv_s * num_tokens
            if view.eviction_s:
                cost += view.eviction_s * (weights.price * (longest - matched) + weights.room * (num_tokens - longest))
            costs.append(cost)
        return costs

    def _scores(self, views: Sequence[ReplicaView], weights: _Weights) -> tuple[Score, ...]:
        """Every term by name."""
        scores = []
        for view in views:
            prefill = own_prefill_s(view)
            if not self._config.quadratic:
                prefill = view.rates.base_s + view.rates.linear_s * (view.num_tokens - view.matched_tokens)
            missing = _missing_s(view, weights)
            waiting = weights.delay * view.num_waiting + weights.later * min(view.typical_queue, MAX_LATER)
            terms = {
                "queue": view.queued_prefill_s,
                "seats": weights.seats * view.seat_wait_s,
                "overtaken": -weights.overtake * view.overtaken_s,
                "prefill": prefill,
                "recompute": self._config.tau * prefill,
                "later": weights.later * prefill * min(view.typical_queue, MAX_LATER),
                "delay": weights.delay * prefill * view.num_waiting,
                "shared": -weights.shared * missing * (weights.own + waiting),
                "decode": weights.decode * view.num_running * view.rates.decode_kv_s * view.num_tokens
                + weights.beside * view.overtaken_s,
                "duplicates": weights.price * view.eviction_s * (weights.longest - view.matched_tokens),
                "room": weights.room * view.eviction_s * (view.num_tokens - weights.longest),
            }
            scores.append(Score(view.replica_id, sum(terms.values()), terms))
        return tuple(scores)

    def _weights(self, request: RouteRequest, fleet: FleetSnapshot) -> _Weights:
        config, views = self._config, fleet.replicas
        expected_output = fleet.expected_output_tokens
        if request.max_output_tokens is not None:
            expected_output = min(expected_output, request.max_output_tokens)
        num_waiting = num_evicting = longest = 0
        for view in views:
            num_waiting += view.num_waiting
            num_evicting += view.eviction_s != 0.0
            longest = max(longest, view.matched_tokens)
        reuse = 2.0 + num_waiting / len(views)
        overtake = float(config.order and config.overtake)
        num_alike = max(fleet.num_alike - num_waiting, 0)  # whoever waits may be one of them
        quiet = max(1.0 - fleet.typical_queue / BUSY_QUEUE, 0.0)
        return _Weights(
            1.0 + config.tau,
            config.delay,
            config.kappa * expected_output,
            config.duplicate_price * reuse,
            config.room * quiet * reuse if 2 * num_evicting <= len(views) else 0.0,
            longest,
            float(config.quadratic),
            config.later,
            overtake,
            config.kappa * overtake,
            1.0 - 1.0 / (1 + num_alike) if config.alike else 0.0,
            config.seats,
        )


def _missing_s(view: ReplicaView, weights: _Weights) -> float:
    """Seconds that the replica takes for what the longest match holds and it doesn't."""
    matched, num_missing, rates = view.matched_tokens, weights.longest - view.matched_tokens, view.rates
    attention = weights.quadratic * rates.quadratic_s * (matched + num_missing / 2)
    return num_missing * (rates.linear_s + attention)


def _break_tie(near: list[ReplicaView], rng: random.Random) -> ReplicaView:
    """The longest match, then the fewest requests in flight, then chance."""
    longest = max([view.matched_tokens for view in near])
    fewest = min([view.num_in_flight for view in near if view.matched_tokens == longest])
    return pick([view for view in near if view.matched_tokens == longest and view.num_in_flight == fewest], rng)


def _reason(chosen: ReplicaView, longest: int, num_replicas: int) -> str:
    if num_replicas == 1:
        return "only_replica"
    if not longest:
        return "cold"
    return "warm" if chosen.matched_tokens == longest else "balance"
