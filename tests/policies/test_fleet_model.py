"""FleetState under any order of events: its counters are those of the leases that a plain dict says are live."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from policies.events import (
    BlocksCleared,
    BlocksRecalled,
    BlocksRemoved,
    BlocksStored,
    Dispatched,
    Failed,
    FailureKind,
    FeedLost,
    Finished,
    FirstToken,
    Left,
    Restarted,
    StatsReported,
    StatusChanged,
)
from policies.fleet import FleetState
from policies.types import ReplicaId, ReplicaStatus
from tests.policies.support import BLOCK, chain, joined, keys, request

names = st.sampled_from("abc")
paths = st.text(alphabet="xy", min_size=1, max_size=8)
numbers = st.integers(0, 7)
cached = st.none() | st.integers(0, 200)


class FleetMachine(RuleBasedStateMachine):
    """`live`: request id -> [replica, prompt, started]. Ids are few, so that late and repeated events are common."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetState()
        self.known: dict[str, ReplicaStatus] = {}
        self.live: dict[str, tuple[str, str, bool]] = {}
        self.now = 0.0
        self.incarnations = 0

    def tick(self) -> float:
        self.now += 0.01
        return self.now

    def purge(self, name: str) -> None:
        self.live = {rid: lease for rid, lease in self.live.items() if lease[0] != name}

    @rule(name=names, num_blocks=st.sampled_from([0, 6, 1000]), status=st.sampled_from(ReplicaStatus))
    def join(self, name: str, num_blocks: int, status: ReplicaStatus) -> None:
        self.incarnations += 1
        self.fleet.apply(joined(name, num_blocks, self.tick(), str(self.incarnations)))
        self.fleet.apply(StatusChanged(self.tick(), ReplicaId(name), status))
        self.purge(name)
        self.known[name] = status

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.fleet.apply(Left(self.tick(), ReplicaId(name)))
        self.purge(name)
        self.known.pop(name, None)

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.incarnations += 1
        self.fleet.apply(Restarted(self.tick(), ReplicaId(name), str(self.incarnations)))
        self.purge(name)

    @rule(name=names, path=paths, start=st.integers(0, 4))
    def recall(self, name: str, path: str, start: int) -> None:
        part = keys(path)[start:]
        before = {r: self.fleet.stats(r).num_index_blocks for r in self.fleet.replica_ids()}
        self.fleet.apply(BlocksRecalled(self.tick(), ReplicaId(name), part, self.now - 5.0))
        for replica_id, num_blocks in before.items():
            assert self.fleet.stats(replica_id).num_index_blocks >= num_blocks, "something was evicted for it"

    @rule(name=names, number=numbers, path=paths, matched=st.integers(0, 200), streamed=st.booleans())
    def dispatch(self, name: str, number: int, path: str, matched: int, streamed: bool) -> None:
        rid = f"r{number}"
        if rid in self.live:
            return
        self.fleet.apply(Dispatched(self.tick(), ReplicaId(name), rid, chain(path), matched, streamed))
        if name in self.known:
            self.live[rid] = (name, path, False)

    @rule(name=names, number=numbers, cached_tokens=cached)
    def first_token(self, name: str, number: int, cached_tokens: int | None) -> None:
        rid = f"r{number}"
        self.fleet.apply(FirstToken(self.tick(), ReplicaId(name), rid, cached_tokens))
        if rid in self.live and self.live[rid][0] == name:
            self.live[rid] = (name, self.live[rid][1], True)

    @rule(name=names, number=numbers, cached_tokens=cached, num_output_tokens=st.integers(0, 50))
    def finish(self, name: str, number: int, cached_tokens: int | None, num_output_tokens: int) -> None:
        rid = f"r{number}"
        self.fleet.apply(Finished(self.tick(), ReplicaId(name), rid, num_output_tokens, cached_tokens))
        if rid in self.live and self.live[rid][0] == name:
            del self.live[rid]

    @rule(name=names, number=numbers, kind=st.sampled_from(FailureKind))
    def fail(self, name: str, number: int, kind: FailureKind) -> None:
        rid = f"r{number}"
        self.fleet.apply(Failed(self.tick(), ReplicaId(name), rid, kind))
        if rid in self.live and self.live[rid][0] == name:
            del self.live[rid]

    @rule(name=names, running=st.integers(0, 5), waiting=st.integers(0, 5), queued=st.none() | st.integers(0, 999))
    def report(self, name: str, running: int, waiting: int, queued: int | None) -> None:
        self.fleet.apply(StatsReported(self.tick(), ReplicaId(name), running, waiting, 0.5, queued))

    @rule(name=names, path=paths, kind=st.sampled_from([BlocksStored, BlocksRemoved]))
    def blocks(self, name: str, path: str, kind: type[BlocksStored] | type[BlocksRemoved]) -> None:
        self.fleet.apply(kind(self.tick(), ReplicaId(name), keys(path)))

    @rule(name=names, kind=st.sampled_from([BlocksCleared, FeedLost]))
    def feed(self, name: str, kind: type[BlocksCleared] | type[FeedLost]) -> None:
        self.fleet.apply(kind(self.tick(), ReplicaId(name)))

    @rule(seconds=st.floats(0.0, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees(self) -> None:
        self.fleet.check_invariants()
        assert self.fleet.num_leases() == len(self.live)
        for name in self.known:
            mine = [lease for lease in self.live.values() if lease[0] == name]
            stats = self.fleet.stats(ReplicaId(name), self.now)
            assert stats.num_waiting + stats.num_running >= len(mine)
            assert stats.queued_prefill_s >= 0.0
            assert 0.0 <= stats.kv_usage <= 1.0

    @invariant()
    def snapshots(self) -> None:
        views = self.fleet.snapshot(request("probe", "xyxy"), self.now).replicas
        assert [v.replica_id for v in views] == sorted(n for n, s in self.known.items() if s is ReplicaStatus.READY)
        for view in views:
            assert 0 <= view.matched_tokens < view.num_tokens
            assert view.matched_tokens % BLOCK == 0

    def teardown(self) -> None:
        """Once every request has ended, nothing of our own is left anywhere."""
        for number in range(8):
            for name in "abc":
                self.fail(name, number, FailureKind.CANCELLED)
        self.now += 100.0  # reports are forgotten
        for name in self.known:
            stats = self.fleet.stats(ReplicaId(name), self.now)
            assert (stats.num_waiting, stats.num_running, stats.queued_prefill_tokens) == (0, 0, 0)
            assert stats.queued_prefill_s == 0.0
            assert stats.kv_usage == 0.0


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
