"""A policy beside the fleet that it looks at, both fed the same events, as a driver does it."""

from __future__ import annotations

import random

from policies.events import Dispatched, Event, Finished, FirstToken
from policies.fleet import FleetState
from policies.registry import make_policy
from policies.stateful import observer_of
from policies.types import Decision, FleetSnapshot, ReplicaId, ReplicaView, RouteRequest
from tests.policies.support import chain, joined, request


class Driven:
    """`spec`: a policy by name, with settings."""

    def __init__(self, spec: str, *names: str, num_blocks: int = 1000, seed: int = 0) -> None:
        self.policy = make_policy(spec)
        self.fleet = FleetState()
        self.rng = random.Random(seed)
        self._observe = observer_of(self.policy)
        self._number = 0
        for name in names:
            self.apply(joined(name, num_blocks))

    def apply(self, event: Event) -> None:
        self.fleet.apply(event)
        if self._observe is not None:
            self._observe(event)

    def ask(self, path: str, at: float = 0.0, **extra: object) -> Decision:
        """Where would it go?"""
        asked = request("probe", path, **extra)
        return self.policy.choose(asked, self.fleet.snapshot(asked, at), self.rng)

    def send(self, path: str, at: float = 0.0, to: str | None = None, **extra: object) -> str:
        """Route (or force) a request there; returns its id."""
        self._number += 1
        rid = f"r{self._number}"
        session = extra.get("session")
        assert session is None or isinstance(session, str)
        where = ReplicaId(to) if to is not None else self.ask(path, at, **extra).replica_id
        self.apply(Dispatched(at, where, rid, chain(path), 0, session=session))
        self.sent_to = where
        return rid

    def serve(self, path: str, at: float = 0.0, to: str | None = None, **extra: object) -> ReplicaId:
        """A whole request; returns where it went."""
        rid = self.send(path, at, to, **extra)
        where = self.sent_to
        self.apply(FirstToken(at + 0.1, where, rid))
        self.apply(Finished(at + 0.2, where, rid, 10))
        return where

    def choose(self, path: str, *views: ReplicaView, now: float = 0.0) -> Decision:
        """With these views instead of the fleet's; the policy's own memory still counts."""
        return choose_among(self, request("probe", path), *views, now=now)


def choose_among(driven: Driven, asked: RouteRequest, *views: ReplicaView, now: float = 0.0) -> Decision:
    return driven.policy.choose(asked, FleetSnapshot(now, 0, views), driven.rng)
