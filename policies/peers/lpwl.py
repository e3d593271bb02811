"""Least prefill workload: prefill tokens waiting at the replica plus the request's own uncached tokens, the minimum.

Known weaknesses: linear in tokens, though attention is not; decoding requests count for nothing; and a token costs the
same on every replica, however fast.
"""

from __future__ import annotations

import random

from policies.decide import decision, least_score, reason_of, scored
from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest


class Lpwl:
    name = "lpwl"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        def terms(view: ReplicaView) -> dict[str, float]:
            uncached = view.num_tokens - view.matched_tokens
            return {"pending": float(view.queued_prefill_tokens), "uncached": float(uncached)}

        scores = scored(fleet, terms, lambda each: each["pending"] + each["uncached"])
        chosen = least_score(fleet, scores, rng)
        return decision(self.name, chosen, fleet, reason_of(chosen, fleet), scores)
