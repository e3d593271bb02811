"""A replica's KV events on their way to the gateways: late, and sometimes lost.

Each step's batch is one message with a number. A gateway that sees a gap marks the feed lost, asks for the cache as a
whole, and gets it `recover_s` later as BlocksCleared and BlocksStored; what comes in between is added to what it has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from engine_worker.core.events import AllBlocksCleared, BlocksStored, KVEvent
from loadtest.sim.clock import Clock
from loadtest.sim.prompts import key_of
from loadtest.sim.setup import Conditions
from policies import events
from policies.types import BlockKey, ReplicaId


class KVFeed:
    """From one engine to everybody: `deliver` gives an event to all gateways."""

    def __init__(
        self, replica_id: ReplicaId, clock: Clock, conditions: Conditions, rng: random.Random,
        deliver: Callable[[events.Event], None],
    ) -> None:  # fmt: skip
        self._replica_id = replica_id
        self._clock = clock
        self._conditions = conditions
        self._rng = rng
        self._deliver = deliver
        self._parents: dict[BlockKey, BlockKey | None] = {}  # what the engine holds, oldest first
        self._gap = False
        self._generation = 0
        self.num_lost = 0

    def publish(self, batch: Iterable[KVEvent]) -> None:
        """One step's events, in order."""
        translated = [self._translate(event) for event in batch]
        if not translated:
            return
        when = self._clock.now + self._conditions.feed_delay_s
        if self._conditions.feed_loss and self._rng.random() < self._conditions.feed_loss:
            self.num_lost += 1
            self._gap = True
            return
        if self._gap:
            self._gap = False
            self._clock.at(when, self._arrive, events.FeedLost(when, self._replica_id), self._generation)
            self._clock.at(when + self._conditions.feed_recover_s, self._recover, self._generation)
        for event in translated:
            self._clock.at(when, self._arrive, event(when), self._generation)

    def restart(self) -> None:
        """The process died, and its cache with it. What was on its way comes to nothing."""
        self._parents.clear()
        self._gap = False
        self._generation += 1

    def _arrive(self, event: events.Event, generation: int) -> None:
        if generation == self._generation:
            self._deliver(event)

    def _recover(self, generation: int) -> None:
        if generation != self._generation:
            return
        now = self._clock.now
        self._deliver(events.BlocksCleared(now, self._replica_id))
        for keys in self._paths():
            self._deliver(events.BlocksStored(now, self._replica_id, keys))

    def _paths(self) -> list[tuple[BlockKey, ...]]:
        """The cache as chains, each behind one that came before it. A parent is always older than its child."""
        paths: list[list[BlockKey]] = []
        ends: dict[BlockKey, list[BlockKey]] = {}
        for key, parent in self._parents.items():
            path = ends.pop(parent, None) if parent is not None else None
            if path is None:
                path = []
                paths.append(path)
            path.append(key)
            ends[key] = path
        return [tuple(path) for path in paths]

    def _translate(self, event: KVEvent) -> Callable[[float], events.Event]:
        replica_id = self._replica_id
        if isinstance(event, BlocksStored):
            keys = tuple(key_of(block_hash) for block_hash in event.block_hashes)
            parent = None if event.parent_block_hash is None else key_of(event.parent_block_hash)
            for key in keys:
                self._parents[key] = parent
                parent = key
            return lambda at: events.BlocksStored(at, replica_id, keys)
        if isinstance(event, AllBlocksCleared):
            self._parents.clear()
            return lambda at: events.BlocksCleared(at, replica_id)
        gone = tuple(key_of(block_hash) for block_hash in event.block_hashes)
        for key in gone:
            self._parents.pop(key, None)
        return lambda at: events.BlocksRemoved(at, replica_id, gone)
