"""The replicas that the gateway knows: where each is, what it serves, whether it takes requests.

The registry is the one place that turns what was seen of a replica (a poll's report, a refused connection) into fleet
events, so that FleetState and the registry can't disagree. A replica joins the fleet with its first report that names
its models, and is never forgotten while it is configured: when it is down, it is known and not routable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gateway.config import ReplicaSpec
from gateway.guard import Interrupt, Interruptible
from gateway.replicas.dialect import Report
from gateway.replicas.gate import OPEN_AFTER, Gate
from gateway.replicas.room import Room
from gateway.upstream import Target
from policies.events import Event, Joined, Restarted, StatsReported, StatusChanged
from policies.types import KeySpace, ReplicaId, ReplicaStatus

_log = logging.getLogger("warmgate.replicas")
NO_SPACE = KeySpace("")
# SGLang has the field too, but releases before spring 2026 read it and don't use it; it counts when its user says so.
_SALTED_DIALECTS = ("warmgate", "vllm")


@dataclass(slots=True, eq=False)
class Replica:
    """One configured endpoint and what is known of it now.

    status, incarnation, models, key_space, block_tokens, num_blocks
              as last told to the fleet (status DOWN and the rest empty before the first report)
    model_fingerprint
              the same for bundled workers that can go on with each other's answers; "" for what can't
    waiting   the requests that wait there for a first token, or whose answer could be continued elsewhere
    gate      how much of the traffic it may have; `num_leases` is what it has now
    cut_trouble
              why its keys are made of text though they were meant to be made of tokens, or ""
    breaker   why its gate's circuit breaker is open; "" while it is closed
    drained   somebody wants it to get no new requests
    key_mode  token or text (prefix/); `kv_feed`: how its cache contents are known
    """

    spec: ReplicaSpec
    replica_id: ReplicaId
    api_key: str | None
    joined: bool = False
    status: ReplicaStatus = ReplicaStatus.DOWN
    incarnation: str = ""
    models: frozenset[str] = frozenset()
    key_space: KeySpace = NO_SPACE
    block_tokens: int = 0
    num_blocks: int = 0
    model_fingerprint: str = ""
    dialect: str = ""
    key_mode: str = "text"
    kv_feed: str = "none"
    detail: str = "not reached yet"
    breaker: str = ""
    cut_trouble: str = ""
    waiting: set[Interruptible] = field(default_factory=set)
    gate: Gate = field(default_factory=lambda: Gate(0.0))
    num_leases: int = 0
    drained: bool = False
    targets: dict[str, Target] = field(default_factory=dict)
    room: Room = field(default_factory=Room)

    @property
    def keeps_apart(self) -> bool:
        """Prompts with different cache salts share nothing in its cache."""
        told = self.spec.cache_salt
        return told if told is not None else self.dialect in _SALTED_DIALECTS

    def breaker_opened(self, last: str) -> None:
        """`last` says how the last of the failures was one."""
        self.breaker = f"{OPEN_AFTER} requests in a row failed there (the last: {last}), so it gets trials only"
        _log.warning("replica %s: %s", self.replica_id, self.breaker)

    def breaker_closed(self) -> None:
        self.breaker = ""
        _log.info("replica %s: a request went well, so it gets its share again", self.replica_id)

    @property
    def remarks(self) -> str:
        """All that an operator should know of it, beside its state."""
        return "; ".join(remark for remark in (self.detail, self.breaker, self.cut_trouble) if remark)

    def target(self, path: str) -> Target:
        """Where requests for `path` go, which is one of the gateway's own routes (so the cache is bounded)."""
        target = self.targets.get(path)
        if target is None:
            target = self.targets[path] = Target(self.spec.url, path)
        return target


@dataclass(frozen=True, slots=True)
class Cut:
    """How a replica's prompts are cut into blocks: decided when it joins (token mode) or by default (text mode).

    `trouble` is a sentence on why it is text mode though somebody meant otherwise, or "".
    """

    key_space: KeySpace
    block_tokens: int
    key_mode: str
    trouble: str = ""


class Registry:
    """`emit` applies an event to the fleet; `clock` is the monotonic clock of the events. `wants_apart`: requests with
    keys don't go to replicas that mix tenants' caches."""

    def __init__(
        self,
        specs: Iterable[ReplicaSpec],
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        on_restart: Callable[[str], None] = lambda replica_id: None,
        slow_start_s: float = 0.0,
        wants_apart: bool = False,
    ) -> None:
        self._emit = emit
        self._wants_apart = wants_apart
        self._clock = clock
        self._on_restart = on_restart
        self._replicas: dict[ReplicaId, Replica] = {}
        # Gathered when asked for, until something changes. Names that nobody serves are not kept: clients choose them.
        self._model_names: frozenset[str] | None = None
        self._mixing: frozenset[ReplicaId] | None = None
        self._ready: dict[str | None, tuple[Replica, ...]] = {}
        self._key_spaces: dict[str, frozenset[KeySpace]] = {}
        for spec in specs:
            replica_id = ReplicaId(spec.name)
            key = spec.api_key.get_secret_value() if spec.api_key is not None else None
            self._replicas[replica_id] = Replica(spec, replica_id, key, gate=Gate(slow_start_s))

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, replica_id: ReplicaId) -> Replica:
        return self._replicas[replica_id]

    def find(self, replica_id: ReplicaId) -> Replica | None:
        """For names that come from elsewhere."""
        return self._replicas.get(replica_id)

    @property
    def model_names(self) -> frozenset[str]:
        """Models of all replicas that have joined, ready or not."""
        if self._model_names is None:
            self._model_names = frozenset().union(*(replica.models for replica in self._replicas.values()))
        return self._model_names

    def models(self) -> list[str]:
        """Models of all replicas that have joined, ready or not, sorted."""
        return sorted(self.model_names)

    def ready(self, model: str | None = None) -> tuple[Replica, ...]:
        """The replicas that take requests (for `model`)."""
        found = self._ready.get(model)
        if found is None:
            found = tuple(r for r in self._replicas.values() if _is_ready(r, model))
            if found:
                self._ready[model] = found
        return found

    def key_spaces(self, model: str) -> frozenset[KeySpace]:
        """The key spaces in which a request for `model` needs chains: those of the replicas that may get it."""
        found = self._key_spaces.get(model)
        if found is None:
            found = frozenset(replica.key_space for replica in self.ready(model))
            if found:
                self._key_spaces[model] = found
        return found

    def speaks(self, replica: Replica, dialect: str) -> None:
        """What it is was found out (anew)."""
        replica.dialect = dialect
        self._mixing = None

    def mixing(self) -> frozenset[ReplicaId]:
        """Replicas whose caches don't keep salts apart."""
        if self._mixing is None:
            self._mixing = frozenset(r.replica_id for r in self._replicas.values() if r.joined and not r.keeps_apart)
        return self._mixing

    def num_slots(self, model: str) -> int:
        """How many requests the replicas that are ready for `model` should have at most, as learned; 0: no bound."""
        num_slots = 0
        for replica in self.ready(model):
            slots = replica.room.num_slots
            if not slots:
                return 0
            num_slots += slots
        return num_slots

    def _changed(self) -> None:
        self._model_names = None
        self._mixing = None
        self._ready.clear()
        self._key_spaces.clear()

    def joins(self, replica: Replica, report: Report, cut: Cut) -> None:
        """The first report that names its models, or one that changes them or the cut."""
        replica.joined = True
        replica.models = report.models
        replica.incarnation = report.incarnation
        replica.key_space, replica.block_tokens, replica.key_mode = cut.key_space, cut.block_tokens, cut.key_mode
        replica.cut_trouble = cut.trouble
        replica.num_blocks = report.capacity_blocks(cut.block_tokens)
        replica.status = _status(replica, report.status)
        replica.detail = report.detail
        self._changed()
        self._emit(
            Joined(
                self._clock(),
                replica.replica_id,
                report.incarnation,
                report.models,
                cut.key_space,
                cut.block_tokens,
                replica.num_blocks,
                replica.status,
                report.step_tokens,
                report.num_seats,
            )
        )
        _log.info(
            "replica %s joined (%s, %s): %s, %s keys",
            replica.replica_id, replica.dialect, report.status.value, ", ".join(sorted(report.models)), cut.key_mode,
        )  # fmt: skip
        if self._wants_apart and not replica.keeps_apart:
            _log.warning(
                "replica %s doesn't keep tenants' caches apart (cache_salt), so it gets no requests with API keys; "
                "unsalted_replicas: allow lets them through", replica.replica_id,
            )  # fmt: skip

    def restarted(self, replica: Replica, incarnation: str, num_blocks: int, num_seats: int) -> None:
        """Another process answers there: what was cached and queued is gone."""
        _log.info("replica %s restarted: its cache counts as empty", replica.replica_id)
        replica.incarnation = incarnation
        replica.num_blocks = num_blocks
        self._emit(Restarted(self._clock(), replica.replica_id, incarnation, num_blocks, num_seats))
        self._on_restart(replica.replica_id)

    def reports(self, replica: Replica, report: Report) -> None:
        """A later report of the same process: its status and load."""
        replica.model_fingerprint = report.model_fingerprint
        self.set_status(replica, report.status, report.detail)
        if report.has_load:
            replica.room.reported(report.num_running, report.num_waiting)
            self._emit(
                StatsReported(
                    self._clock(),
                    replica.replica_id,
                    report.num_running,
                    report.num_waiting,
                    report.kv_usage,
                    report.queued_prefill_tokens,
                    report.capacity_blocks(replica.block_tokens) or None,
                )
            )

    def drain(self, replica: Replica, drained: bool) -> None:
        """Give it no new requests (what it has goes on), or give it some again."""
        replica.drained = drained
        if replica.status is (ReplicaStatus.READY if drained else ReplicaStatus.DRAINING):
            status = ReplicaStatus.DRAINING if drained else ReplicaStatus.READY
            self.set_status(replica, status, "drained by an administrator" if drained else "")

    def set_status(self, replica: Replica, status: ReplicaStatus, detail: str) -> None:
        status = _status(replica, status)
        replica.detail = detail
        if not replica.joined or replica.status is status:
            return
        level = logging.WARNING if status is ReplicaStatus.DOWN else logging.INFO
        _log.log(level, "replica %s is %s%s", replica.replica_id, status.value, f": {detail}" if detail else "")
        replica.status = status
        self._changed()
        self._emit(StatusChanged(self._clock(), replica.replica_id, status))

    def check_invariants(self) -> None:
        for model, ready in self._ready.items():
            assert ready == tuple(r for r in self._replicas.values() if _is_ready(r, model))
        assert self._mixing in (None, frozenset(r.replica_id for r in self if r.joined and not r.keeps_apart))
        for model, spaces in self._key_spaces.items():
            assert spaces == frozenset(replica.key_space for replica in self.ready(model))
        for replica_id, replica in self._replicas.items():
            assert replica.replica_id == replica_id
            replica.gate.check_invariants()
            assert replica.num_leases >= 0
            assert not (replica.drained and replica.status is ReplicaStatus.READY)
            assert replica.joined == bool(replica.models), "a replica joins when it names its models"
            assert replica.joined or replica.status is ReplicaStatus.DOWN
            assert not replica.joined or replica.key_space, "what has joined has a key space"

    def interrupt_waiting(self, replica: Replica) -> None:
        """Let the requests that wait there for a first token fail over."""
        for guard in list(replica.waiting):
            guard.interrupt(Interrupt.REPLICA_STUCK)


def _status(replica: Replica, status: ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus.DRAINING if replica.drained and status is ReplicaStatus.READY else status


def _is_ready(replica: Replica, model: str | None) -> bool:
    return replica.status is ReplicaStatus.READY and (model is None or model in replica.models)
