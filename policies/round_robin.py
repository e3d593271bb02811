"""Round robin: the replicas in turn, whatever they hold or do. The baseline that every other rule must beat."""

from __future__ import annotations

import random

from policies.decide import decision
from policies.types import Decision, FleetSnapshot, RouteRequest


class RoundRobin:
    """Turn by the number of decisions so far, so that it needs no state of its own."""

    name = "round_robin"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        return decision(self.name, fleet.replicas[fleet.sequence % len(fleet.replicas)], fleet, "turn")
