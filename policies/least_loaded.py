"""Least loaded: the fewest requests in flight, then the fewest queued prompt tokens, then chance. Blind to prefixes."""

from __future__ import annotations

import random

from policies.decide import decision, pick
from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest, Score


class LeastLoaded:
    """Counts requests, so a long prompt weighs as much as a short one."""

    name = "least_loaded"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        least = min(_load(view) for view in fleet.replicas)
        chosen = pick([view for view in fleet.replicas if _load(view) == least], rng)
        scores = tuple(
            Score(v.replica_id, float(v.num_in_flight), {"in_flight": float(v.num_in_flight)}) for v in fleet.replicas
        )
        return decision(self.name, chosen, fleet, "load", scores)


def _load(view: ReplicaView) -> tuple[int, int]:
    return view.num_in_flight, view.queued_prefill_tokens
