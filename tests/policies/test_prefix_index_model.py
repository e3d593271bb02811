"""The prefix index against brute force: a set of keys a replica, and a list of them from old to young."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from policies.prefix_index import PrefixIndex
from policies.types import BlockKey, ReplicaId
from tests.policies.support import keys

REPLICAS = [ReplicaId(name) for name in "abc"]
replicas = st.sampled_from(REPLICAS)
paths = st.text(alphabet="xy", min_size=1, max_size=9)
PROBES = [f"{head}{tail}" for head in ("xxxx", "xyxy", "yxxy", "yyyy") for tail in ("xxxxx", "yyyyy", "xyxyx")]


@dataclass
class ModelReplica:
    """Blocks one by one. `order`: unpinned held blocks, the next to evict first."""

    capacity: int
    held: set[BlockKey] = field(default_factory=set)
    confirmed: set[BlockKey] = field(default_factory=set)
    order: list[BlockKey] = field(default_factory=list)
    pins: Counter[BlockKey] = field(default_factory=Counter)

    def match(self, prompt: tuple[BlockKey, ...]) -> int:
        length = 0
        while length < len(prompt) and prompt[length] in self.held:
            length += 1
        return length

    def pin(self, prompt: tuple[BlockKey, ...]) -> None:
        for block in prompt:
            self.pins[block] += 1
            self.held.add(block)
            if block in self.order:
                self.order.remove(block)
        self.evict()

    def unpin(self, prompt: tuple[BlockKey, ...], keep: int | None) -> None:
        for place, block in reversed(list(enumerate(prompt))):
            self.pins[block] -= 1
            if self.pins[block]:
                continue
            del self.pins[block]
            if keep is not None and place >= keep and block not in self.confirmed:
                self.held.discard(block)
            if block in self.held:
                self.order.append(block)
        self.evict()

    def evict(self) -> None:
        while len(self.held) > self.capacity and self.order:
            self.drop(self.order[0])

    def drop(self, block: BlockKey) -> None:
        self.held.discard(block)
        self.confirmed.discard(block)
        if block in self.order:
            self.order.remove(block)

    def clear(self) -> None:
        self.held.clear()
        self.confirmed.clear()
        self.order.clear()


class IndexMachine(RuleBasedStateMachine):
    """What both kinds of replica share."""

    leases = Bundle("leases")
    capacities = st.integers(2, 14)

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.index = PrefixIndex()
        self.models: dict[ReplicaId, ModelReplica] = {}
        self.generation = Counter[ReplicaId]()
        for replica_id in REPLICAS:
            self.models[replica_id] = ModelReplica(data.draw(self.capacities))
            self.index.add(replica_id, self.models[replica_id].capacity)

    @rule(target=leases, replica_id=replicas, path=paths)
    def pin(self, replica_id: ReplicaId, path: str) -> tuple[ReplicaId, str, int, int]:
        expected = self.models[replica_id].match(keys(path))
        held, confirmed = self.index.pin(replica_id, keys(path))
        assert held == expected
        assert confirmed <= held
        self.models[replica_id].pin(keys(path))
        return replica_id, path, held, self.generation[replica_id]

    @rule(lease=consumes(leases))
    def finish(self, lease: tuple[ReplicaId, str, int, int]) -> None:
        self.end(lease, keep=False)

    @rule(lease=consumes(leases))
    def fail(self, lease: tuple[ReplicaId, str, int, int]) -> None:
        self.end(lease, keep=True)

    def end(self, lease: tuple[ReplicaId, str, int, int], keep: bool) -> None:
        replica_id, path, held, generation = lease
        if generation == self.generation[replica_id]:
            keep_blocks = held if keep else None
            self.index.unpin(replica_id, keys(path), 0.0, keep_blocks)
            self.models[replica_id].unpin(keys(path), keep_blocks)

    @rule(replica_id=replicas)
    def restart(self, replica_id: ReplicaId) -> None:
        self.index.remove(replica_id)
        self.generation[replica_id] += 1
        model = self.models[replica_id] = ModelReplica(self.models[replica_id].capacity)
        self.index.add(replica_id, model.capacity)

    @rule(path=paths)
    def matches(self, path: str) -> None:
        expected = {replica_id: model.match(keys(path)) for replica_id, model in self.models.items()}
        assert self.index.match(keys(path)) == {r: n for r, n in expected.items() if n}

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        for replica_id, model in self.models.items():
            assert self.index.num_blocks(replica_id) == len(model.held)
        for path in PROBES:
            self.matches(path)


class ApproximateMachine(IndexMachine):
    """No KV events: exact LRU eviction, first tokens confirm."""

    leases = Bundle("leases")

    @rule(target=leases, lease=consumes(leases))
    def first_token(self, lease: tuple[ReplicaId, str, int, int]) -> tuple[ReplicaId, str, int, int]:
        replica_id, path, _, generation = lease
        if generation == self.generation[replica_id]:
            self.index.computed(replica_id, keys(path))
            model = self.models[replica_id]
            model.confirmed |= model.held & set(keys(path))
        return lease

    @rule(replica_id=replicas, capacity=st.integers(2, 14))
    def resize(self, replica_id: ReplicaId, capacity: int) -> None:
        self.index.resize(replica_id, capacity)
        self.models[replica_id].capacity = capacity
        self.models[replica_id].evict()


class EventMachine(IndexMachine):
    """With KV events, which may remove any block at any time: holes and all."""

    leases = Bundle("leases")
    capacities = st.just(10_000)

    @initialize()
    def events_flow(self) -> None:
        for replica_id in REPLICAS:
            if hasattr(self, "index"):
                self.index.clear(replica_id)

    @rule(replica_id=replicas, path=paths, start=st.integers(0, 8))
    def store(self, replica_id: ReplicaId, path: str, start: int) -> None:
        stored = keys(path)[min(start, len(path) - 1) :]
        self.index.store(replica_id, stored)
        model = self.models[replica_id]
        model.held |= set(stored)
        model.confirmed |= set(stored)
        model.order += [block for block in stored if not model.pins[block] and block not in model.order]

    @rule(replica_id=replicas, path=paths, places=st.sets(st.integers(0, 8), min_size=1))
    def discard(self, replica_id: ReplicaId, path: str, places: set[int]) -> None:
        gone = [block for place, block in enumerate(keys(path)) if place in places]
        self.index.discard(replica_id, gone)
        for block in gone:
            self.models[replica_id].drop(block)

    @rule(replica_id=replicas)
    def clear(self, replica_id: ReplicaId) -> None:
        self.index.clear(replica_id)
        self.models[replica_id].clear()

    @rule(target=leases, replica_id=replicas, path=paths)
    def pin_twice(self, replica_id: ReplicaId, path: str) -> object:
        return multiple(self.pin(replica_id, path), self.pin(replica_id, path))


STEPS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestApproximate = ApproximateMachine.TestCase
TestApproximate.settings = STEPS
TestEvents = EventMachine.TestCase
TestEvents.settings = STEPS


def test_a_tail_and_a_hole_before_it_go_at_once() -> None:
    index = PrefixIndex()
    index.add(REPLICAS[0], 100)
    prompt = keys("xxxxx")
    index.store(REPLICAS[0], prompt)
    index.discard(REPLICAS[0], [prompt[0], prompt[1], prompt[4]])
    index.check_invariants()
    assert index.num_blocks(REPLICAS[0]) == 2
