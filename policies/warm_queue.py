"""`warm` with a short queue in the gateway, so that the order is still open when a replica gets free.

An engine serves its queue first come, first served; what has been sent there waits behind whatever is long. Here a
replica has at most `max_outstanding_tokens` of uncached prompt ahead of it (two steps of the engine; a longer prompt
goes when nothing waits there), and the rest waits in the gateway, by

    rank = own work + aging x arrival time       (seconds; lower first)

the shortest remaining work first, aged so that nobody waits for ever. Work is the prefill at the replica that holds
most of the prompt.

Only what will announce itself counts as ahead: our own streamed requests, whose first tokens wake the queue up. What
others send there, and requests that aren't streamed, would keep somebody waiting for news that never come.

Who is asked for, in that order, is placed as `warm` would, with what better-ranked requests still wait for counted as
if it were in the replica's queue already: a request whose replica has no room waits for it, unless the line for it has
become so long that another costs less. The queue moves waiting from before the first token to between tokens (prefill
and decode mix more), so it is a policy of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from policies.decide import own_prefill_s
from policies.fleet import FleetState
from policies.queue import Hold
from policies.types import Decision, FleetSnapshot, Policy, ReplicaId, ReplicaStatus, ReplicaView, RouteRequest
from policies.warm import Warm
from policies.warm_config import WarmConfig

NAME = "warm_queue"


@dataclass(frozen=True, slots=True)
class WarmQueueConfig(WarmConfig):
    """`aging`: seconds of work that a second's earlier arrival is worth."""

    max_outstanding_tokens: int = 14_336
    aging: float = 0.05


class WarmQueue:
    """The choice is made when the hold lets a request go; `choose` then repeats it."""

    def __init__(self, config: WarmQueueConfig | None = None) -> None:
        self.name = NAME
        self.config = config or WarmQueueConfig()
        self._warm = Warm(self.config, name=self.name)
        self._placed: dict[str, Decision] = {}

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
        placed = self._placed.pop(request.request_id, None)
        if placed is not None and any(view.replica_id == placed.replica_id for view in fleet.replicas):
            return placed
        return self._warm.choose(request, fleet, rng)

    def make_hold(self, fleet: FleetState, seed: int = 0) -> Hold:
        """The rule that keeps requests in the queue in front of `fleet`."""
        return WarmHold(self.config, self._warm, self._placed, fleet, random.Random(seed))


class WarmHold:
    """See the module's header. What it remembers lasts for one poll."""

    def __init__(
        self,
        config: WarmQueueConfig,
        warm: Warm,
        placed: dict[str, Decision],
        fleet: FleetState,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._warm = warm
        self._placed = placed
        self._fleet = fleet
        self._rng = rng
        self._held: dict[ReplicaId, tuple[int, float]] = {}  # requests refused in this poll, and their seconds
        self._is_open = False
        self._is_stale = True

    def rank(self, request: RouteRequest, arrived_at: float, now: float) -> float:
        views = self._fleet.snapshot(request, now).replicas
        return min(map(own_prefill_s, views), default=0.0) + self._config.aging * arrived_at

    def begin(self, now: float) -> bool:
        self._held.clear()
        self._placed.clear()
        return self._has_room(now)

    def admits(self, request: RouteRequest, now: float) -> bool:
        if not (self._has_room(now) if self._is_stale else self._is_open):
            return False
        snapshot = self._fleet.snapshot(request, now)
        if not snapshot.replicas:
            return True
        views = tuple(map(self._with_held, snapshot.replicas)) if self._held else snapshot.replicas
        seen = replace(snapshot, replicas=views)
        decision = self._warm.choose(request, seen, self._rng)
        [chosen] = [view for view in snapshot.replicas if view.replica_id == decision.replica_id]
        uncached = chosen.num_tokens - chosen.matched_tokens
        queued = self._fleet.stats(chosen.replica_id, now).expected_prefill_tokens
        if queued and queued + uncached > self._config.max_outstanding_tokens:
            num_held, seconds = self._held.get(chosen.replica_id, (0, 0.0))
            self._held[chosen.replica_id] = (num_held + 1, seconds + own_prefill_s(chosen))
            return False
        self._placed[request.request_id] = decision
        self._is_stale = True
        return True

    def _with_held(self, view: ReplicaView) -> ReplicaView:
        num_held, seconds = self._held.get(view.replica_id, (0, 0.0))
        if not num_held:
            return view
        return replace(view, queued_prefill_s=view.queued_prefill_s + seconds)

    def _has_room(self, now: float) -> bool:
        stats = [self._fleet.stats(replica_id, now) for replica_id in self._fleet.replica_ids()]
        queued = [each.expected_prefill_tokens for each in stats if each.status is ReplicaStatus.READY]
        # without any, whoever dispatches says why it can't be
        self._is_open = not queued or min(queued) < self._config.max_outstanding_tokens
        self._is_stale = False
        return self._is_open


def hold_of(policy: Policy, fleet: FleetState) -> Hold | None:
    """The hold of a policy that has one; None lets every request through at once."""
    return policy.make_hold(fleet) if isinstance(policy, WarmQueue) else None
