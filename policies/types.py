"""What a routing policy sees and what it answers.

A policy is a pure function of (request, fleet snapshot, rng) to a decision: no clock, no I/O, no global randomness.
The gateway and the simulator drive the same policies with these types, so nothing here knows about HTTP.

A prompt is known to the router as a *chain* of block keys: key i names the whole prefix up to and including block i,
so equal keys mean equal prefixes and a replica that holds key i holds every earlier block of the chain too. Replicas
of one model may cut prompts differently (block size, tokenizer at hand or not): each cut is a *key space*, and a
request carries one chain for every key space in its fleet.

What every request makes anew (here and in events.py) has an initializer of its own and `Final` fields in place of
`frozen=True`, which is checked by mypy, and at run time where the modules are compiled (gateway/compiled.py): a frozen
dataclass takes five times as long to make, compiled thirty times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple, NewType, Protocol, overload

ReplicaId = NewType("ReplicaId", str)
BlockKey = NewType("BlockKey", int)  # xxh3_128 of (parent key, block); see DESIGN.md, Block keys
KeySpace = NewType("KeySpace", str)  # tokenizer fingerprint and block size, or a text-mode cut


class ReplicaStatus(StrEnum):
    """Whether a replica may be given new requests. Only READY ones appear in a snapshot."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(init=False, slots=True)
class PrefixChain:
    """A prompt cut into blocks, root first. Only full blocks have keys; `num_tokens` counts the tail too.

    In text mode `block_tokens` and `num_tokens` are estimates (characters over a mean token length).
    """

    keys: Final[tuple[BlockKey, ...]]
    block_tokens: Final[int]
    num_tokens: Final[int]

    def __init__(self, keys: tuple[BlockKey, ...], block_tokens: int, num_tokens: int) -> None:
        self.keys = keys
        self.block_tokens = block_tokens
        self.num_tokens = num_tokens


NO_CHAINS: Mapping[KeySpace, PrefixChain] = MappingProxyType({})
NOBODY: frozenset[ReplicaId] = frozenset()


@dataclass(init=False, slots=True)
class RouteRequest:
    """One request as the router sees it. `excluded` names replicas that already failed it; `streamed` False: the
    answer comes in one piece, so its first token is not seen."""

    request_id: Final[str]
    model: Final[str]
    num_tokens: Final[int]
    chains: Final[Mapping[KeySpace, PrefixChain]]
    max_output_tokens: Final[int | None]
    session: Final[str | None]
    tenant: Final[str]
    priority: Final[int]
    excluded: Final[frozenset[ReplicaId]]
    streamed: Final[bool]

    def __init__(
        self,
        request_id: str,
        model: str,
        num_tokens: int,
        chains: Mapping[KeySpace, PrefixChain] = NO_CHAINS,
        max_output_tokens: int | None = None,
        session: str | None = None,
        tenant: str = "",
        priority: int = 0,
        excluded: frozenset[ReplicaId] = NOBODY,
        streamed: bool = True,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.num_tokens = num_tokens
        self.chains = chains
        self.max_output_tokens = max_output_tokens
        self.session = session
        self.tenant = tenant
        self.priority = priority
        self.excluded = excluded
        self.streamed = streamed


@dataclass(frozen=True, slots=True)
class Rates:
    """A replica's speed as learned online (seconds).

    Prefill of n uncached tokens after c cached ones takes `base_s + linear_s * n + quadratic_s * n * (c + n / 2)`;
    one decode step takes about `decode_step_s` and `decode_kv_s` more for every KV token of the running batch.
    `num_observations` of 0 means these are the defaults, or what the rest of the fleet taught.
    """

    base_s: float
    linear_s: float
    quadratic_s: float
    decode_step_s: float
    num_observations: int = 0
    decode_kv_s: float = 0.0

    def prefill_s(self, num_uncached: int, num_cached: int) -> float:
        """Expected seconds to prefill `num_uncached` tokens behind `num_cached` ones that are already in the cache."""
        attended = num_uncached * (num_cached + num_uncached / 2)
        return self.base_s + self.linear_s * num_uncached + self.quadratic_s * attended


@dataclass(init=False, slots=True)
class ReplicaView:
    """One routable replica, seen for one request at one moment.

    matched_tokens   expected cached tokens of this request here: whole blocks of its first num_tokens - 1
    queued_prefill_tokens, queued_prefill_s
                     uncached prompt tokens dispatched here with no first token yet, and the seconds that they are
                     expected to take still (the fluid work clock W of the cost model)
    typical_queue    how many requests wait here, on average over time lately
    overtaken_s      seconds of the queue that this request would overtake, where the shortest are served first
    seat_wait_s      seconds until an answer's end leaves room for it, where no more requests can run at once; else 0
    num_waiting      requests dispatched here with no first token yet
    num_running      requests here past their first token
    kv_usage         share of KV blocks held by running requests, 0 to 1
    eviction_s       expected seconds lost later for every token of this prompt that is newly cached here, since it
                     pushes another one out; 0 while there is room (retouch.py)
    """

    replica_id: Final[ReplicaId]
    incarnation: Final[str]
    num_tokens: Final[int]
    matched_tokens: Final[int]
    queued_prefill_tokens: Final[int]
    queued_prefill_s: Final[float]
    num_waiting: Final[int]
    num_running: Final[int]
    kv_usage: Final[float]
    rates: Final[Rates]
    eviction_s: Final[float]
    overtaken_s: Final[float]
    typical_queue: Final[float]
    seat_wait_s: Final[float]

    def __init__(
        self,
        replica_id: ReplicaId,
        incarnation: str,
        num_tokens: int,
        matched_tokens: int,
        queued_prefill_tokens: int,
        queued_prefill_s: float,
        num_waiting: int,
        num_running: int,
        kv_usage: float,
        rates: Rates,
        eviction_s: float = 0.0,
        overtaken_s: float = 0.0,
        typical_queue: float = 0.0,
        seat_wait_s: float = 0.0,
    ) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.num_tokens = num_tokens
        self.matched_tokens = matched_tokens
        self.queued_prefill_tokens = queued_prefill_tokens
        self.queued_prefill_s = queued_prefill_s
        self.num_waiting = num_waiting
        self.num_running = num_running
        self.kv_usage = kv_usage
        self.rates = rates
        self.eviction_s = eviction_s
        self.overtaken_s = overtaken_s
        self.typical_queue = typical_queue
        self.seat_wait_s = seat_wait_s

    @property
    def num_in_flight(self) -> int:
        return self.num_waiting + self.num_running


@dataclass(init=False, slots=True)
class FleetSnapshot:
    """The routable replicas for one request, in a stable order (by id). `sequence` counts decisions so far.

    `expected_output_tokens` is the mean output of the requests that finished lately; `typical_queue` how many requests
    wait at a replica, on average over time lately; `num_alike` how many under way begin with all that the longest match
    holds.
    """

    now: Final[float]
    sequence: Final[int]
    replicas: Final[tuple[ReplicaView, ...]]
    expected_output_tokens: Final[float]
    typical_queue: Final[float]
    num_alike: Final[int]

    def __init__(
        self,
        now: float,
        sequence: int,
        replicas: tuple[ReplicaView, ...],
        expected_output_tokens: float = 200.0,
        typical_queue: float = 0.0,
        num_alike: int = 0,
    ) -> None:
        self.now = now
        self.sequence = sequence
        self.replicas = replicas
        self.expected_output_tokens = expected_output_tokens
        self.typical_queue = typical_queue
        self.num_alike = num_alike


class Score(NamedTuple):
    """One replica's total and the terms it is the sum of, in seconds where the policy is in seconds."""

    replica_id: ReplicaId
    total: float
    terms: Mapping[str, float] = MappingProxyType({})


class LazyScores(Sequence[Score]):
    """Scores that are worked out when somebody asks: most decisions are never explained."""

    __slots__ = ("_make", "_scores")

    def __init__(self, make: Callable[[], tuple[Score, ...]]) -> None:
        self._make: Callable[[], tuple[Score, ...]] | None = make
        self._scores: tuple[Score, ...] = ()

    def _all(self) -> tuple[Score, ...]:
        if self._make is not None:
            self._scores, self._make = self._make(), None
        return self._scores

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Score, ...]: ...
    def __getitem__(self, index: int | slice) -> Score | tuple[Score, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Score]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())


@dataclass(init=False, slots=True)
class Decision:
    """Where a request goes and why. `reason` is one short word for the metrics' label. `work_s`: the seconds of prefill
    by which the replica is asked to order it among those who wait there; None asks for nothing."""

    replica_id: Final[ReplicaId]
    policy: Final[str]
    reason: Final[str]
    matched_tokens: Final[int]
    num_tokens: Final[int]
    expected_ttft_s: Final[float]
    scores: Final[Sequence[Score]]
    work_s: Final[float | None]

    def __init__(
        self,
        replica_id: ReplicaId,
        policy: str,
        reason: str,
        matched_tokens: int,
        num_tokens: int,
        expected_ttft_s: float,
        scores: Sequence[Score] = (),
        work_s: float | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.policy = policy
        self.reason = reason
        self.matched_tokens = matched_tokens
        self.num_tokens = num_tokens
        self.expected_ttft_s = expected_ttft_s
        self.scores = scores
        self.work_s = work_s


class Policy(Protocol):
    """A routing rule. `fleet.replicas` is never empty when `choose` is called."""

    @property
    def name(self) -> str: ...

    def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision: ...
