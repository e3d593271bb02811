"""Session stickiness, as load balancers do it: a session stays where its first request went.

A new session goes to the replica with the fewest requests in flight, and so does a request without a session. Where a
session's replica cannot take it (gone, draining, excluded), it moves for good.

Known weakness: sessions are never balanced again, however long they grow or however busy their replica.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from policies.decide import decision, least_requests
from policies.events import Dispatched, Event, Joined
from policies.peers.memory import ReplicaMemory
from policies.types import Decision, FleetSnapshot, ReplicaId, RouteRequest


@dataclass(frozen=True, slots=True)
class StickyConfig:
    """`max_sessions`: as many as were used last are remembered."""

    max_sessions: int = 100_000


class Sticky:
    name = "sticky"

    def __init__(self, config: StickyConfig | None = None) -> None:
        self._max_sessions = (config or StickyConfig()).max_sessions
        self._members: ReplicaMemory[None] = ReplicaMemory(_nothing, self._forget)
        self._where: OrderedDict[str, ReplicaId] = OrderedDict()

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        """`reason`: session (it stays) or load."""
        if request.session is not None:
            home = self._where.get(request.session)
            for view in fleet.replicas:
                if view.replica_id == home:
                    return decision(self.name, view, fleet, "session")
        return decision(self.name, least_requests(fleet.replicas, rng), fleet, "load")

    def observe(self, event: Event) -> None:
        self._members.observe(event)
        if not isinstance(event, Dispatched) or event.session is None:
            return
        if self._members.joined(event.replica_id) is None:
            return
        self._where[event.session] = event.replica_id
        self._where.move_to_end(event.session)
        if len(self._where) > self._max_sessions:
            self._where.popitem(last=False)

    def _forget(self, replica_id: ReplicaId) -> None:
        for session in [s for s, where in self._where.items() if where == replica_id]:
            del self._where[session]

    def check_invariants(self) -> None:
        self._members.check_invariants()
        assert len(self._where) <= self._max_sessions
        assert set(self._where.values()) <= {replica_id for replica_id, _ in self._members.items()}


def _nothing(_: Joined) -> None:
    return None
