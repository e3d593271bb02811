"""What policies remember, against simple models and under any order of events."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from policies.events import Dispatched, Event, Failed, FailureKind, Finished, FirstToken, Left, Restarted
from policies.fleet import FleetState
from policies.peers.memory import HeldPrefixes, leading
from policies.registry import make_policy, policy_names
from policies.stateful import Stateful
from policies.types import ReplicaId
from tests.policies.support import chain, joined, keys, request

paths = st.text(alphabet="xyz", min_size=1, max_size=6)
replicas = st.sampled_from([ReplicaId(name) for name in "abc"])
REMEMBERING = [name for name in policy_names() if isinstance(make_policy(name), Stateful)]
SMALL = {  # sizes that are reached
    "approximate_tree": "approximate_tree:max_tree_tokens=96:eviction_interval_s=5",
    "aibrix": "aibrix:table_tokens=128:ttl_s=20",
    "production_stack": "production_stack:max_blocks=8",
    "preble": "preble:window_s=15:default_num_blocks=6:max_requests=9",
    "dualmap": "dualmap:window=10:min_samples=3:hot_share=0.3:cold_share=0.15",
    "sticky": "sticky:max_sessions=3",
}


def test_the_policies_that_remember() -> None:
    assert [
        "bounded_hash" if False else name
        for name in ("approximate_tree", "aibrix", "production_stack", "dynamo", "preble", "dualmap", "sticky")
    ] == REMEMBERING


@given(st.lists(st.tuples(st.booleans(), paths), max_size=30), paths)
@settings(deadline=None)
def test_held_prefixes_is_an_lru_of_prompts_whose_tails_go_first(steps: list[tuple[bool, str]], probe: str) -> None:
    held, model = HeldPrefixes(), []
    for evict, path in steps:
        held.touch(keys(path))
        for key in reversed(keys(path)):
            if key in model:
                model.remove(key)
            model.append(key)
        if evict:
            held.evict_to(4)
            del model[: max(len(model) - 4, 0)]
        assert list(held.oldest(100)) == model
    expected = next((i for i, key in enumerate(keys(probe)) if key not in model), len(probe))
    assert held.match(keys(probe)) == expected


@given(st.sets(st.integers(0, 7)))
def test_leading_counts_up_to_the_first_that_is_missing(cut: set[int]) -> None:
    path = keys("xyzxyzxy")
    length = min(cut, default=8)
    assert leading(set(path[:length]), path) == length


class MemoryMachine(RuleBasedStateMachine):
    """All remembering policies side by side, fed like drivers feed them."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetState()
        self.policies = {name: make_policy(SMALL.get(name, name)) for name in REMEMBERING}
        self.twins = {name: make_policy(SMALL.get(name, name)) for name in REMEMBERING}
        self.log: list[Event] = []
        self.now = 0.0
        self.number = 0
        for name in "abc":
            self.apply(joined(name, 6))

    def apply(self, event: Event) -> None:
        self.log.append(event)
        self.fleet.apply(event)
        for policy in self.policies.values():
            assert isinstance(policy, Stateful)
            policy.observe(event)

    def tick(self, seconds: float = 1.0) -> float:
        self.now += seconds
        return self.now

    @rule(target=leases, replica_id=replicas, path=paths, session=st.sampled_from(["s", "t", "u", "v", None]))
    def dispatch(self, replica_id: ReplicaId, path: str, session: str | None) -> tuple[ReplicaId, str]:
        self.number += 1
        rid = str(self.number)
        self.apply(Dispatched(self.tick(), replica_id, rid, chain(path), 0, session=session))
        return replica_id, rid

    @rule(lease=consumes(leases), ended=st.sampled_from(["finish", "fail"]))
    def end(self, lease: tuple[ReplicaId, str], ended: str) -> None:
        replica_id, rid = lease
        self.apply(FirstToken(self.tick(), replica_id, rid, 0))
        if ended == "finish":
            self.apply(Finished(self.tick(), replica_id, rid, 5))
        else:
            self.apply(Failed(self.tick(), replica_id, rid, FailureKind.BROKEN))

    @rule(replica_id=replicas)
    def restart(self, replica_id: ReplicaId) -> None:
        self.apply(Restarted(self.tick(), replica_id, f"i{self.number}-{self.now}"))

    @rule(replica_id=replicas)
    def leave(self, replica_id: ReplicaId) -> None:
        self.apply(Left(self.tick(), replica_id))

    @rule(replica_id=replicas, incarnation=st.sampled_from(["one", "two"]))
    def join(self, replica_id: ReplicaId, incarnation: str) -> None:
        self.apply(joined(replica_id, 6, self.tick(), incarnation))

    @rule(seconds=st.integers(5, 30))
    def wait(self, seconds: int) -> None:
        self.tick(float(seconds))

    @rule(path=paths, session=st.sampled_from(["s", "t", None]))
    def choose(self, path: str, session: str | None) -> None:
        """Every decision is within the snapshot, and the same for whoever has seen the same events."""
        asked = request("probe", path, session=session)
        snapshot = self.fleet.snapshot(asked, self.now)
        if not snapshot.replicas:
            return
        for event in self.log:
            for twin in self.twins.values():
                assert isinstance(twin, Stateful)
                twin.observe(event)
        self.log.clear()
        for name, policy in self.policies.items():
            decision = policy.choose(asked, snapshot, random.Random(3))
            assert decision.replica_id in {view.replica_id for view in snapshot.replicas}
            assert decision == self.twins[name].choose(asked, snapshot, random.Random(3))

    @invariant()
    def holds_together(self) -> None:
        for policy in self.policies.values():
            assert isinstance(policy, Stateful)
            policy.check_invariants()


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
