"""Who borrows whose speed: the rates of all replicas, kept up to date as they learn.

Replicas of the same models are peers; cost.py says what a replica takes over from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.cost import NUM_SCALING, fleet_rates
from policies.replica import Replica
from policies.types import Rates


class RateBook:
    """An observation must not cost in proportion to the fleet, so peers follow at once while a replica is new to its
    speed, and later once for as many observations as there are replicas."""

    def __init__(self) -> None:
        self._num_learned = 0  # observations since all rates were refreshed
        self._fleet_rates: dict[frozenset[str], Rates | None] = {}

    def learned(self, replica: Replica, replicas: Sequence[Replica]) -> None:
        """The speed model of one of `replicas` has moved."""
        self._num_learned += 1
        if replica.load.speed.num_observations <= NUM_SCALING or self._num_learned >= len(replicas):
            self.refresh(replicas)
        else:
            replica.rates = replica.load.speed.rates(self._fleet_rates[replica.models])

    def refresh(self, replicas: Sequence[Replica]) -> None:
        self._num_learned = 0
        by_models: dict[frozenset[str], list[Replica]] = {}
        for replica in replicas:
            by_models.setdefault(replica.models, []).append(replica)
        self._fleet_rates = {m: fleet_rates([peer.load.speed for peer in peers]) for m, peers in by_models.items()}
        for replica in replicas:
            replica.rates = replica.load.speed.rates(self._fleet_rates[replica.models])
