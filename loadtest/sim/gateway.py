"""A gateway as the simulator sees it: FleetState, a policy, and perhaps a queue. No clock of its own, no network.

Events reach FleetState and then the policy, if it remembers anything (policies/stateful.py), as in the real gateway.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from loadtest.sim.job import Job
from policies.events import Event
from policies.fleet import FleetState
from policies.queue import RequestQueue
from policies.registry import fleet_config, make_policy
from policies.stateful import observer_of
from policies.types import Decision, KeySpace, PrefixChain, RouteRequest
from policies.warm_queue import hold_of

SPACE = KeySpace("trace")
MODEL = "simulated"


class SimGateway:
    """`block_tokens`: of the chains' blocks. `on_release` is called with the id of a request that may go now."""

    def __init__(self, policy: str, block_tokens: int, rng: random.Random, on_release: Callable[[str], None]) -> None:
        self.fleet = FleetState(fleet_config(policy))
        self.policy = make_policy(policy)
        self._observe = observer_of(self.policy)
        self._rng = rng
        self._block_tokens = block_tokens
        self._on_release = on_release
        hold = hold_of(self.policy, self.fleet)
        self.queue = RequestQueue(hold) if hold is not None else None

    def see(self, event: Event) -> None:
        self.fleet.apply(event)
        if self._observe is not None:
            self._observe(event)

    def chain(self, job: Job) -> PrefixChain:
        keys = tuple([name.key for name in job.names])
        return PrefixChain(keys, self._block_tokens, job.trace.num_prompt_tokens)

    def route_request(self, job: Job, chain: PrefixChain) -> RouteRequest:
        return RouteRequest(
            job.job_id, MODEL, chain.num_tokens, {SPACE: chain}, session=job.trace.session, excluded=job.excluded
        )

    def choose(self, request: RouteRequest, now: float) -> Decision | None:
        """The decision, or None when no replica may take the request."""
        snapshot = self.fleet.snapshot(request, now)
        return self.policy.choose(request, snapshot, self._rng) if snapshot.replicas else None

    def num_candidates(self, request: RouteRequest, now: float) -> int:
        return len(self.fleet.snapshot(request, now).replicas)

    def arrive(self, request: RouteRequest, now: float) -> None:
        """Release it, or let it wait in the queue as long as the policy's hold wants."""
        if self.queue is None:
            self._on_release(request.request_id)
        else:
            self.queue.arrive(request, now)
            self.poll(now)

    def poll(self, now: float) -> None:
        """Something happened: let go whom the hold lets go."""
        if self.queue is not None and len(self.queue):
            self.queue.poll(now, lambda request: self._on_release(request.request_id))
