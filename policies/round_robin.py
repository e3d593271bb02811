"""Round robin: the replicas in turn, whatever they hold or do. The baseline that every other rule must beat."""

from __future__ import annotations

import random

from policies.types import Decision, FleetSnapshot, RouteRequest
from policies.warm import own_prefill_s


class RoundRobin:
    """Turn by the number of decisions so far, so that it needs no state of its own."""

    name = "round_robin"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        chosen = fleet.replicas[fleet.sequence % len(fleet.replicas)]
        return Decision(
            replica_id=chosen.replica_id,
            policy=self.name,
            reason="only_replica" if len(fleet.replicas) == 1 else "turn",
            matched_tokens=chosen.matched_tokens,
            num_tokens=chosen.num_tokens,
            expected_ttft_s=chosen.queued_prefill_s + own_prefill_s(chosen),
        )
