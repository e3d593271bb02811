"""Everything that can happen to a fleet, as frozen data. FleetState applies them; nothing else changes its state.

(The four that every request brings are made as types.py says.)

`at` is the driver's monotonic clock in seconds (the simulator's or the gateway's). A request that was dispatched holds
exactly one lease, named by its request id, until Finished or Failed; a failover is Failed and then Dispatched again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from policies.types import BlockKey, KeySpace, PrefixChain, ReplicaId, ReplicaStatus


@dataclass(frozen=True, slots=True)
class Joined:
    """A replica is known. `num_blocks` is its KV capacity in blocks of `block_tokens` (0 when unknown). `step_tokens`:
    prompt tokens of a step, of an engine that serves the shortest first as it is told (0: first come, first served).
    `num_seats`: requests that it computes at once (0 when unknown)."""

    at: float
    replica_id: ReplicaId
    incarnation: str
    models: frozenset[str]
    key_space: KeySpace
    block_tokens: int
    num_blocks: int = 0
    status: ReplicaStatus = ReplicaStatus.READY
    step_tokens: int = 0
    num_seats: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    at: float
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class Restarted:
    """The same address answers as another process: its cache is empty and its old requests are gone. A count of 0: as
    it was."""

    at: float
    replica_id: ReplicaId
    incarnation: str
    num_blocks: int = 0
    num_seats: int = 0


@dataclass(frozen=True, slots=True)
class StatusChanged:
    at: float
    replica_id: ReplicaId
    status: ReplicaStatus


@dataclass(init=False, slots=True)
class Dispatched:
    """`streamed` False: no FirstToken will tell when its prefill ended, only Finished when all of it has."""

    at: Final[float]
    replica_id: Final[ReplicaId]
    request_id: Final[str]
    chain: Final[PrefixChain]
    matched_tokens: Final[int]
    streamed: Final[bool]
    session: Final[str | None]

    def __init__(
        self,
        at: float,
        replica_id: ReplicaId,
        request_id: str,
        chain: PrefixChain,
        matched_tokens: int,
        streamed: bool = True,
        session: str | None = None,
    ) -> None:
        self.at = at
        self.replica_id = replica_id
        self.request_id = request_id
        self.chain = chain
        self.matched_tokens = matched_tokens
        self.streamed = streamed
        self.session = session


@dataclass(init=False, slots=True)
class FirstToken:
    """The first output token arrived. `cached_tokens` is what the replica said it reused, where it says so."""

    at: Final[float]
    replica_id: Final[ReplicaId]
    request_id: Final[str]
    cached_tokens: Final[int | None]

    def __init__(self, at: float, replica_id: ReplicaId, request_id: str, cached_tokens: int | None = None) -> None:
        self.at = at
        self.replica_id = replica_id
        self.request_id = request_id
        self.cached_tokens = cached_tokens


@dataclass(init=False, slots=True)
class Finished:
    at: Final[float]
    replica_id: Final[ReplicaId]
    request_id: Final[str]
    num_output_tokens: Final[int]
    cached_tokens: Final[int | None]
    num_prompt_tokens: Final[int | None]

    def __init__(
        self,
        at: float,
        replica_id: ReplicaId,
        request_id: str,
        num_output_tokens: int,
        cached_tokens: int | None = None,
        num_prompt_tokens: int | None = None,
    ) -> None:
        self.at = at
        self.replica_id = replica_id
        self.request_id = request_id
        self.num_output_tokens = num_output_tokens
        self.cached_tokens = cached_tokens
        self.num_prompt_tokens = num_prompt_tokens


class FailureKind(StrEnum):
    """How a dispatched request ended without finishing. CANCELLED (by the client) says nothing about the replica."""

    CONNECT = "connect"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    CANCELLED = "cancelled"


@dataclass(init=False, slots=True)
class Failed:
    at: Final[float]
    replica_id: Final[ReplicaId]
    request_id: Final[str]
    kind: Final[FailureKind]

    def __init__(self, at: float, replica_id: ReplicaId, request_id: str, kind: FailureKind) -> None:
        self.at = at
        self.replica_id = replica_id
        self.request_id = request_id
        self.kind = kind


@dataclass(frozen=True, slots=True)
class StatsReported:
    """A replica's own count of its load, from its state endpoint or its metrics. None: it does not say."""

    at: float
    replica_id: ReplicaId
    num_running: int
    num_waiting: int
    kv_usage: float
    queued_prefill_tokens: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Confirmed by the replica's KV events: it holds these keys (root side first)."""

    at: float
    replica_id: ReplicaId
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    at: float
    replica_id: ReplicaId
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    at: float
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class FeedLost:
    """The replica's KV events have a gap that could not be replayed, or stopped.

    What is known of its cache stays as a prediction, and later events only add to it: the mirror by capacity is in
    force again until BlocksCleared, Restarted or Joined makes the feed whole.
    """

    at: float
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class BlocksRecalled:
    """Somebody else's picture of the replica has these keys (consecutive, root side first): predictions, older than
    all that is known of it already. `used_at` is when they were last used there, as far as known."""

    at: float
    replica_id: ReplicaId
    keys: tuple[BlockKey, ...]
    used_at: float


Event = (
    Joined
    | Left
    | Restarted
    | StatusChanged
    | Dispatched
    | FirstToken
    | Finished
    | Failed
    | StatsReported
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | FeedLost
    | BlocksRecalled
)
