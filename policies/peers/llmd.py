"""llm-d's scheduler (the Gateway API inference extension) with its default scorers and weights.

    score = 3 x prefix + 2 x queue + 2 x kv        (the maximum wins, ties by chance)

prefix  share of the prompt that the replica holds (the precise scorer: from KV events, so this router's own index)
queue   1 for the shortest waiting queue, 0 for the longest, linear between; 1 for all when they are equal
kv      1 - share of KV blocks in use

Known weakness: a weighted sum of shares has no unit. A queue one request longer costs as much as one fifty longer when
it is the longest, and half a prompt of 200 tokens counts like half of one of 100,000.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from policies.decide import decision, least_score, reason_of, scored
from policies.types import Decision, FleetSnapshot, ReplicaView, RouteRequest


@dataclass(frozen=True, slots=True)
class LlmdConfig:
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0


class Llmd:
    name = "llmd"

    def __init__(self, config: LlmdConfig | None = None) -> None:
        self._config = config or LlmdConfig()

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        queues = [view.num_waiting for view in fleet.replicas]
        longest, shortest = max(queues), min(queues)
        config = self._config

        def terms(view: ReplicaView) -> dict[str, float]:
            queue = (longest - view.num_waiting) / (longest - shortest) if longest > shortest else 1.0
            return {
                "prefix": config.prefix_weight * view.matched_tokens / max(view.num_tokens, 1),
                "queue": config.queue_weight * queue,
                "kv": config.kv_weight * (1.0 - view.kv_usage),
            }

        scores = scored(fleet, terms, lambda each: -sum(each.values()))
        chosen = least_score(fleet, scores, rng)
        return decision(self.name, chosen, fleet, reason_of(chosen, fleet), scores)
