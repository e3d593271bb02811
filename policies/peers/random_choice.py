"""Random: any replica. Blind to prefixes and to load; the floor that power of two choices is measured against."""

from __future__ import annotations

import random

from policies.decide import decision, pick
from policies.types import Decision, FleetSnapshot, RouteRequest


class RandomChoice:
    name = "random"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        return decision(self.name, pick(fleet.replicas, rng), fleet, "chance")
