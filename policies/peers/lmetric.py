"""LMetric: two indicators multiplied, so that no weight between them has to be tuned.

    score = (prefill tokens waiting there + own uncached tokens) x (requests there + 1)      (the minimum wins)

The first factor knows what is cached, the second how full the batch is. (`count_pending=False` leaves out what waits,
as a shorter reading of the rule has it.)

Known weakness: blind to thrash. A replica whose cache the new prompt will displace looks no worse for it, and a full
hit makes the product small however long the batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.decide import decision, least_score, reason_of, scored
from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class LMetricConfig:
    count_pending: bool = True


class LMetric:
    name = "lmetric"

    def __init__(self, config: LMetricConfig | None = None) -> None:
        self._config = config or LMetricConfig()

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        def terms(view: ReplicaView) -> dict[str, float]:
            pending = view.queued_prefill_tokens if self._config.count_pending else 0
            tokens = pending + view.num_tokens - view.matched_tokens
            return {"tokens": float(tokens), "batch": float(view.num_in_flight + 1)}

        scores = scored(fleet, terms, lambda each: each["tokens"] * each["batch"])
        chosen = least_score(fleet, scores, rng)
        return decision(self.name, chosen, fleet, reason_of(chosen, fleet), scores)
