"""Least loaded: the fewest requests in flight, then the fewest queued prompt tokens, then chance. Blind to prefixes."""

from __future__ import annotations

import random

from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest, Score
from policies.warm import own_prefill_s


class LeastLoaded:
    """Counts requests, so a long prompt weighs as much as a short one."""

    name = "least_loaded"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        least = min(_load(view) for view in fleet.replicas)
        ties = [view for view in fleet.replicas if _load(view) == least]
        chosen = ties[0] if len(ties) == 1 else rng.choice(ties)
        return Decision(
            replica_id=chosen.replica_id,
            policy=self.name,
            reason="only_replica" if len(fleet.replicas) == 1 else "load",
            matched_tokens=chosen.matched_tokens,
            num_tokens=chosen.num_tokens,
            expected_ttft_s=chosen.queued_prefill_s + own_prefill_s(chosen),
            scores=tuple(
                Score(v.replica_id, float(v.num_in_flight), {"in_flight": float(v.num_in_flight)})
                for v in fleet.replicas
            ),
        )


def _load(view: ReplicaView) -> tuple[int, int]:
    return view.num_in_flight, view.queued_prefill_tokens
