"""The default policy: the replica where this request does the least harm, in seconds.

    cost_i = W_i + p_i (1 + tau) + p_i q_i + kappa d_i + e_i

W_i  (`queue`)       prefill seconds still ahead of the request there
p_i  (`prefill`)     its own uncached prefill, quadratic attention included
     (`recompute`)   tau p_i: computing a prefix again spreads it over one more replica and evicts something there
     (`delay`)       p_i q_i: the q_i requests waiting there all wait p_i longer
d_i  (`decode`)      seconds that its KV adds to the output of those running there: running requests, times expected
                     output tokens, times decode seconds a KV token, times its tokens. kappa makes a second between
                     tokens cheaper than a second before the first.
e_i  (`duplicates`)  what caching again pushes out of a full replica: the tokens that the best replica holds and this
                     one doesn't, times the seconds expected to be lost for each evicted there (retouch.py), times
                     2 + the mean queue, as whoever computes it again delays others too. Only duplicates are charged:
                     a new prefix has to live somewhere.

W and p together are the expected time to first token. Costs within TIE_SHARE of the least (or TIE_S seconds) are the
same as far as the rates are known; among those the longest match wins, then the fewest requests in flight, then chance.
So a cold fleet spreads by chance and stays spread, because every dispatch raises W where it went.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.decide import own_prefill_s, pick
from policies.types import Decision, FleetSnapshot, LazyScores, ReplicaView, RouteRequest, Score

TIE_SHARE = 0.05
TIE_S = 0.001


@dataclass(frozen=True, slots=True)
class WarmConfig:
    """Each refinement by itself, so that its worth can be measured.

    tau              recompute tax, in own prefills
    kappa            weight of decode seconds
    delay            weight of the delay to those waiting
    duplicate_price  weight of e_i; 0 charges nothing
    quadratic        whether attention's quadratic term counts in p_i
    """

    tau: float = 1.0
    kappa: float = 0.1
    delay: float = 1.0
    duplicate_price: float = 1.0
    quadratic: bool = True


class Warm:
    """Least expected seconds of marginal harm."""

    name = "warm"

    def __init__(self, config: WarmConfig | None = None) -> None:
        self._config = config or WarmConfig()

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """See the module's header. `reason`: only_replica, cold (nobody holds a block), warm (the longest match won)
        or balance (a longer match lost to load)."""
        views = fleet.replicas
        costs = self._costs(request, fleet)
        least = min(costs)
        bound = least + max(TIE_SHARE * least, TIE_S)
        near = [view for view, cost in zip(views, costs, strict=True) if cost <= bound]
        chosen = near[0] if len(near) == 1 else _break_tie(near, rng)
        longest = max([view.matched_tokens for view in views])
        return Decision(
            replica_id=chosen.replica_id,
            policy=self.name,
            reason=_reason(chosen, longest, len(views)),
            matched_tokens=chosen.matched_tokens,
            num_tokens=chosen.num_tokens,
            expected_ttft_s=chosen.queued_prefill_s + own_prefill_s(chosen),
            scores=LazyScores(lambda: self._scores(request, fleet)),
        )

    def _costs(self, request: RouteRequest, fleet: FleetSnapshot) -> list[float]:
        """The total of every replica. The same sum as in _scores, without names: this is the hot path."""
        config = self._config
        own, decode, price, longest = self._weights(request, fleet)
        delay, quadratic = config.delay, config.quadratic
        costs = []
        for _, _, num_tokens, matched, _, queued_s, num_waiting, num_running, _, rates, eviction_s in fleet.replicas:
            uncached = num_tokens - matched
            prefill = rates.base_s + rates.linear_s * uncached
            if quadratic:
                prefill += rates.quadratic_s * uncached * (matched + uncached / 2)
            cost = queued_s + prefill * (own + delay * num_waiting)
            if num_running:
                cost += decode * num_running * rates.decode_kv_s * num_tokens
            if eviction_s and matched < longest:
                cost += price * eviction_s * (longest - matched)
            costs.append(cost)
        return costs

    def _scores(self, request: RouteRequest, fleet: FleetSnapshot) -> tuple[Score, ...]:
        """Every term by name."""
        config = self._config
        _, decode, price, longest = self._weights(request, fleet)
        scores = []
        for view in fleet.replicas:
            prefill = self._prefill_s(view)
            terms = {
                "queue": view.queued_prefill_s,
                "prefill": prefill,
                "recompute": config.tau * prefill,
                "delay": config.delay * prefill * view.num_waiting,
                "decode": decode * view.num_running * view.rates.decode_kv_s * view.num_tokens,
                "duplicates": price * view.eviction_s * (longest - view.matched_tokens),
            }
            scores.append(Score(view.replica_id, sum(terms.values()), terms))
        return tuple(scores)

    def _weights(self, request: RouteRequest, fleet: FleetSnapshot) -> tuple[float, float, float, int]:
        """What is the same for all replicas: of p, of d, of e, and the longest match."""
        config, views = self._config, fleet.replicas
        expected_output = fleet.expected_output_tokens
        if request.max_output_tokens is not None:
            expected_output = min(expected_output, request.max_output_tokens)
        mean_queue = sum([view.num_waiting for view in views]) / len(views)
        price = config.duplicate_price * (2.0 + mean_queue)
        longest = max([view.matched_tokens for view in views])
        return 1.0 + config.tau, config.kappa * expected_output, price, longest

    def _prefill_s(self, view: ReplicaView) -> float:
        if self._config.quadratic:
            return own_prefill_s(view)
        return view.rates.base_s + view.rates.linear_s * (view.num_tokens - view.matched_tokens)


def _break_tie(near: list[ReplicaView], rng: random.Random) -> ReplicaView:
    best = max((view.matched_tokens, -view.num_in_flight) for view in near)
    return pick([view for view in near if (view.matched_tokens, -view.num_in_flight) == best], rng)


def _reason(chosen: ReplicaView, longest: int, num_replicas: int) -> str:
    if num_replicas == 1:
        return "only_replica"
    if not longest:
        return "cold"
    return "warm" if chosen.matched_tokens == longest else "balance"
