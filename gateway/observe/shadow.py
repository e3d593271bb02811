"""Shadow policies: other rules decide beside the live one, on a share of its decisions, and nobody acts on it.

Every shadow gets the snapshot that the live rule got and, if it remembers, the events that it got. Both choices are
then priced alike, in expected seconds of the cost model that learns from this traffic (policies/cost.py):

    first token   W + p      the prefill ahead of the request on that replica, and its own
    in all        p q more   what the q requests that wait there wait longer

The difference is taken request by request, so traffic that goes up and down cancels out, and it fades over WINDOW
decisions. It is a comparison one request at a time: caches and queues are those that the live rule made, and what they
would be under another rule in charge only a replay of a trace tells (`warmgate replay`). Expected first tokens are held
against those that came, so that one sees what the seconds are worth.

Cost: nothing but a random number for decisions outside the share; in it, one decision a shadow.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from policies.decide import own_prefill_s
from policies.events import Dispatched, Event, Failed, Finished, FirstToken
from policies.registry import make_policy
from policies.stateful import observer_of
from policies.types import Decision, FleetSnapshot, Policy, ReplicaView, RouteRequest

_log = logging.getLogger("warmgate.shadow")
WINDOW = 20_000  # decisions
MAX_AWAITED = 4096
_FADE = 1.0 - 1.0 / WINDOW


@dataclass(slots=True)
class Faded:
    """Sums over decisions, the older ones fading. Differences are shadow less live, in seconds.

    elsewhere          decisions in which it chose another replica
    own_s, total_s     first token, and in all, of the shadow's choice; live_* of the live one's
    difference_s, squared   of total_s, and its squares
    """

    count: float = 0.0
    elsewhere: float = 0.0
    own_s: float = 0.0
    total_s: float = 0.0
    matched_tokens: float = 0.0
    live_own_s: float = 0.0
    live_total_s: float = 0.0
    live_matched_tokens: float = 0.0
    num_tokens: float = 0.0
    difference_s: float = 0.0
    squared: float = 0.0

    def add(self, live: ReplicaView, shadow: ReplicaView) -> None:
        own, live_own = _own_s(shadow), _own_s(live)
        total, live_total = own + _others_s(shadow), live_own + _others_s(live)
        difference = total - live_total
        for name, value in (
            ("count", 1.0), ("elsewhere", float(shadow.replica_id != live.replica_id)), ("own_s", own),
            ("total_s", total), ("matched_tokens", shadow.matched_tokens), ("live_own_s", live_own),
            ("live_total_s", live_total), ("live_matched_tokens", live.matched_tokens), ("num_tokens", live.num_tokens),
            ("difference_s", difference), ("squared", difference * difference),
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) * _FADE + value)

    def mean(self, name: str) -> float:
        return float(getattr(self, name)) / self.count if self.count else 0.0

    @property
    def error_s(self) -> float:
        """Standard error of the mean difference."""
        if self.count < 2.0:
            return float("inf")
        variance = max(self.mean("squared") - self.mean("difference_s") ** 2, 0.0)
        return sqrt(variance / self.count)


@dataclass(slots=True)
class Shadow:
    """One policy beside the live one. Counts never fade."""

    spec: str
    policy: Policy
    observe: Callable[[Event], None] | None
    faded: Faded
    num_decisions: int = 0
    num_elsewhere: int = 0
    num_failed: int = 0
    own_s: float = 0.0
    live_own_s: float = 0.0
    total_s: float = 0.0
    live_total_s: float = 0.0


class Shadows:
    """`specs` as the setting `policy` takes them. Raises policies.registry.UnknownPolicy."""

    def __init__(
        self, specs: Sequence[str], share: float, seed: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.share = share
        self._rng = random.Random(seed)
        self._clock = clock
        self.since = clock()
        self.shadows = [Shadow(spec, *_made(spec), Faded()) for spec in dict.fromkeys(specs)]
        self._observers = [shadow.observe for shadow in self.shadows if shadow.observe is not None]
        self._awaited: dict[str, tuple[float, float]] = {}  # request -> expected first token, dispatched at
        self.num_realised = 0.0
        self.expected_s = 0.0
        self.realised_s = 0.0

    def decide(self, request: RouteRequest, snapshot: FleetSnapshot, live: Decision) -> None:
        """The live rule decided; called before its decision is an event."""
        if len(snapshot.replicas) < 2 or self._rng.random() >= self.share:
            return
        views = {view.replica_id: view for view in snapshot.replicas}
        ours = views[live.replica_id]
        for shadow in self.shadows:
            try:
                theirs = views[shadow.policy.choose(request, snapshot, self._rng).replica_id]
            except Exception:  # a shadow must never cost a request
                if not shadow.num_failed:
                    _log.exception("the shadow policy %s fails; further failures are only counted", shadow.spec)
                shadow.num_failed += 1
                continue
            self._compare(shadow, ours, theirs)
        if request.streamed and len(self._awaited) < MAX_AWAITED:
            self._awaited[request.request_id] = (_own_s(ours), snapshot.now)

    def _compare(self, shadow: Shadow, ours: ReplicaView, theirs: ReplicaView) -> None:
        shadow.num_decisions += 1
        shadow.num_elsewhere += ours.replica_id != theirs.replica_id
        own, live_own = _own_s(theirs), _own_s(ours)
        shadow.own_s += own
        shadow.live_own_s += live_own
        shadow.total_s += own + _others_s(theirs)
        shadow.live_total_s += live_own + _others_s(ours)
        shadow.faded.add(ours, theirs)

    def observe(self, event: Event) -> None:
        """Everything that happens to the fleet, as the live policy hears it."""
        for observe in self._observers:
            observe(event)
        if self._awaited and not isinstance(event, Dispatched):
            self._realise(event)

    def _realise(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            awaited = self._awaited.pop(event.request_id, None)
            if awaited is not None:
                expected_s, dispatched_at = awaited
                self.num_realised = self.num_realised * _FADE + 1.0
                self.expected_s = self.expected_s * _FADE + expected_s
                self.realised_s = self.realised_s * _FADE + max(event.at - dispatched_at, 0.0)
        elif isinstance(event, Finished | Failed):
            self._awaited.pop(event.request_id, None)

    @property
    def watched_s(self) -> float:
        return self._clock() - self.since

    def check_invariants(self) -> None:
        assert len(self._awaited) <= MAX_AWAITED
        for shadow in self.shadows:
            assert 0 <= shadow.num_elsewhere <= shadow.num_decisions
            assert shadow.faded.count <= min(shadow.num_decisions, WINDOW) + 1e-6


def _made(spec: str) -> tuple[Policy, Callable[[Event], None] | None]:
    policy = make_policy(spec)
    return policy, observer_of(policy)


def _own_s(view: ReplicaView) -> float:
    return view.queued_prefill_s + own_prefill_s(view)


def _others_s(view: ReplicaView) -> float:
    return own_prefill_s(view) * view.num_waiting
