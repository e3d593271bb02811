"""The default policy: the replica where this request does the least harm, in seconds.

    cost_i = W_i + p_i (1 + tau) + p_i q_i + kappa d_i

W_i  (`queue`)      prefill seconds still ahead of the request there
p_i  (`prefill`)    its own uncached prefill, quadratic attention included
     (`recompute`)  tau p_i: computing a prefix again spreads it over one more replica and evicts something there
     (`delay`)      p_i q_i: the q_i requests waiting there all wait p_i longer
d_i  (`decode`)     seconds that its KV adds to the output of those running there: running requests, times expected
                    output tokens, times decode seconds a KV token, times its tokens. kappa makes a second between
                    tokens cheaper than a second before the first.

W and p together are the expected time to first token. Costs within TIE_SHARE of the least (or TIE_S seconds) are the
same as far as the rates are known; among those the longest match wins, then the fewest requests in flight, then chance.
So a cold fleet spreads by chance and stays spread, because every dispatch raises W where it went.
"""

from __future__ import annotations

import random

from policies.decide import own_prefill_s, reason_of
from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest, Score

TIE_SHARE = 0.05
TIE_S = 0.001


class Warm:
    """Least expected seconds of marginal harm. `tau`: recompute tax; `kappa`: weight of decode seconds."""

    name = "warm"

    def __init__(self, tau: float = 1.0, kappa: float = 0.1) -> None:
        self._tau = tau
        self._kappa = kappa

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """See the module's header. `reason`: only_replica, cold (nobody holds a block), warm (the longest match won)
        or balance (a longer match lost to load)."""
        expected_output = fleet.expected_output_tokens
        if request.max_output_tokens is not None:
            expected_output = min(expected_output, request.max_output_tokens)
        scores = tuple(self._score(view, expected_output) for view in fleet.replicas)
        least = min(score.total for score in scores)
        bound = least + max(TIE_SHARE * least, TIE_S)
        near = [v for v, s in zip(fleet.replicas, scores, strict=True) if s.total <= bound]
        best = max((view.matched_tokens, -view.num_in_flight) for view in near)
        ties = [view for view in near if (view.matched_tokens, -view.num_in_flight) == best]
        chosen = ties[0] if len(ties) == 1 else rng.choice(ties)
        return Decision(
            replica_id=chosen.replica_id,
            policy=self.name,
            reason=reason_of(chosen, fleet),
            matched_tokens=chosen.matched_tokens,
            num_tokens=chosen.num_tokens,
            expected_ttft_s=chosen.queued_prefill_s + own_prefill_s(chosen),
            scores=scores,
        )

    def _score(self, view: ReplicaView, expected_output: float) -> Score:
        prefill = own_prefill_s(view)
        recompute = self._tau * prefill
        delay = prefill * view.num_waiting
        slowdown = view.num_running * expected_output * view.rates.decode_kv_s * view.num_tokens
        decode = self._kappa * slowdown
        total = view.queued_prefill_s + prefill + recompute + delay + decode
        terms = {
            "queue": view.queued_prefill_s,
            "prefill": prefill,
            "recompute": recompute,
            "delay": delay,
            "decode": decode,
        }
        return Score(view.replica_id, total, terms)
