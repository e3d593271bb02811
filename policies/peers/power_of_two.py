"""Power of two choices: two replicas by chance, the one with fewer requests in flight (Mitzenmacher; SGLang's router,
Ray Serve). Close to least loaded without a view of the whole fleet; blind to prefixes and to the size of prompts."""

from __future__ import annotations

import random

from policies.decide import decision, least_requests
from policies.types import Decision, FleetSnapshot, RouteRequest


class PowerOfTwo:
    name = "power_of_two"

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        views = fleet.replicas
        sample = rng.sample(views, 2) if len(views) > 2 else views
        return decision(self.name, least_requests(sample, rng), fleet, "load")
