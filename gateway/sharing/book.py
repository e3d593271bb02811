"""What this gateway told the others and what they told it: sequences, leases and sources. No I/O and no clock.

Leases. Every gateway names its own (`gateway:request`), so they can't collide. A peer's lease is applied like one of
our own, and is over when the peer says so, when a complete list of its leases doesn't have it, or when the peer has not
been heard for `PEER_TTL_S`: a gateway that died, or that can't reach Redis, takes its load off everybody's books within
seconds, and the replicas' own reports (policies/load.py) stand in for what is really there.

Gaps. A peer's messages are numbered. What comes after a gap is applied, and the peer is asked for all its leases, as a
newcomer asks. A number seen before is skipped.

Blocks. A replica whose KV events only a peer hears is followed through that peer: it is asked for everything once, and
its deltas are applied from then on. A gap, or the peer's silence, makes the picture approximate (FeedLost).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.sharing import wire
from policies.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Dispatched,
    Event,
    Failed,
    FailureKind,
    FeedLost,
    Finished,
    FirstToken,
)
from policies.types import PrefixChain, ReplicaId

PEER_TTL_S = 3.0
ASK_AGAIN_S = 1.0
MAX_PEERS = 64
MAX_LEASES = 50_000  # of one peer
_FAILURES = {kind.value: kind for kind in FailureKind}


class Fleet(Protocol):
    """What the book needs of this gateway."""

    def apply(self, event: Event) -> None:
        """Something that happened through another gateway."""

    def matches(self, replica_id: ReplicaId, incarnation: str, space: str) -> bool:
        """Whether the replica is known here, as the same process with the same cut."""

    def has_lease(self, request_id: str) -> bool: ...

    def lacking(self) -> Sequence[ReplicaId]:
        """Replicas in token mode whose KV events are not heard here."""


@dataclass(slots=True)
class Peer:
    """leases: id here -> replica. `whole`: all of its leases are known. Times are of our clock."""

    gateway_id: str
    next_sequence: int
    heard_at: float
    whole: bool
    asked_at: float = float("-inf")
    leases: dict[str, ReplicaId] = field(default_factory=dict)
    hears: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    asks_index: bool = False


@dataclass(slots=True)
class Requests:
    """What peers asked of us in a message: all leases, blocks of these replicas, a snapshot; `snapshot_ready`: they
    have written one."""

    leases: bool = False
    blocks: list[str] = field(default_factory=list)
    index: bool = False
    snapshot_ready: bool = False


class Book:
    def __init__(self, gateway_id: str, fleet: Fleet) -> None:
        self.gateway_id = gateway_id
        self.peers: dict[str, Peer] = {}
        self.num_gaps = 0
        self.num_applied = 0
        self._fleet = fleet
        self._sources: dict[str, str] = {}  # replica -> the peer through which its blocks are known
        self._blocks_asked: dict[str, float] = {}

    # What comes in

    def receive(self, message: wire.Message, now: float) -> Requests:
        """Apply a peer's message. Raises wire.WireError for what no gateway sends."""
        requests = Requests()
        peer = self._peer(message, now)
        if peer is None:
            return requests
        for item in message.items:
            self._item(peer, item, now, requests)
        return requests

    def _peer(self, message: wire.Message, now: float) -> Peer | None:
        """The sender, when the message is news."""
        peer = self.peers.get(message.gateway_id)
        if peer is None:
            if len(self.peers) >= MAX_PEERS:
                return None
            first = message.sequence == 1
            peer = self.peers[message.gateway_id] = Peer(message.gateway_id, message.sequence, now, first)
        if message.sequence < peer.next_sequence:
            return None
        if message.sequence > peer.next_sequence:
            self.num_gaps += 1
            self._gap(peer, now)
        peer.next_sequence = message.sequence + 1
        peer.heard_at = now
        return peer

    def _gap(self, peer: Peer, now: float) -> None:
        peer.whole = False
        peer.asked_at = float("-inf")
        self._lose_sources(peer.gateway_id, now)

    def _item(self, peer: Peer, item: wire.Item, now: float, requests: Requests) -> None:
        match item:
            case wire.Dispatch():
                self._dispatch(peer, item, now)
            case wire.First():
                self._apply(
                    FirstToken(
                        now - item.age_s, ReplicaId(item.replica_id), self._id(peer, item.request_id),
                        item.cached_tokens,
                    )
                )  # fmt: skip
            case wire.Finish():
                request_id = self._over(peer, item, now)
                self._apply(
                    Finished(
                        now - item.age_s, ReplicaId(item.replica_id), request_id, item.num_output_tokens,
                        item.cached_tokens, item.num_prompt_tokens,
                    )
                )  # fmt: skip
            case wire.Fail():
                request_id = self._over(peer, item, now)
                kind = _FAILURES.get(item.kind, FailureKind.CANCELLED)
                self._apply(Failed(now - item.age_s, ReplicaId(item.replica_id), request_id, kind))
            case wire.Leases():
                self._reconcile(peer, item, now)
            case wire.Blocks():
                self._blocks(peer, item, now)
            case wire.Beat():
                peer.hears, peer.lacks = frozenset(item.hears), frozenset(item.lacks)
                requests.leases |= self.gateway_id in item.asks_leases
                requests.blocks += [replica for gateway, replica in item.asks_blocks if gateway == self.gateway_id]
                peer.asks_index = item.asks_index
                requests.index |= item.asks_index
            case wire.Snapshot():
                requests.snapshot_ready = True
            case wire.Bye():
                self._forget(peer, now)

    def _id(self, peer: Peer, request_id: str) -> str:
        return f"{peer.gateway_id}:{request_id}"

    def _over(self, peer: Peer, item: wire.Finish | wire.Fail, now: float) -> str:
        """A request's end as the peer tells it; its id here. What it had elsewhere, as far as we heard, ends too: the
        news that it had moved on (a failover, a resumed stream) may have been lost."""
        request_id = self._id(peer, item.request_id)
        if peer.leases.get(request_id, item.replica_id) != item.replica_id:
            self._end(peer, request_id, now)
        peer.leases.pop(request_id, None)
        return request_id

    def _dispatch(self, peer: Peer, item: wire.Dispatch, now: float) -> None:
        request_id, replica_id = self._id(peer, item.request_id), ReplicaId(item.replica_id)
        if peer.leases.get(request_id, replica_id) != replica_id:
            self._end(peer, request_id, now)  # it has moved on, and that news was lost
        if not self._fleet.matches(replica_id, item.incarnation, item.space) or len(peer.leases) >= MAX_LEASES:
            return
        if not self._fleet.has_lease(request_id):
            chain = PrefixChain(wire.unpack_keys(item.keys), item.block_tokens, item.num_tokens)
            matched = min(item.matched_tokens, item.num_tokens)
            self._apply(
                Dispatched(now - item.age_s, replica_id, request_id, chain, matched, item.streamed, item.session)
            )
        peer.leases[request_id] = replica_id
        if item.first_age_s is not None:
            self._apply(FirstToken(now - item.first_age_s, replica_id, request_id))

    def _reconcile(self, peer: Peer, item: wire.Leases, now: float) -> None:
        """The peer's complete list: what isn't in it is over, what is and wasn't known begins."""
        listed = {self._id(peer, lease.request_id) for lease in item.leases}
        for request_id in [known for known in peer.leases if known not in listed]:
            self._end(peer, request_id, now)
        for lease in item.leases:
            self._dispatch(peer, lease, now)
        peer.whole = True

    def _end(self, peer: Peer, request_id: str, now: float) -> None:
        self._apply(Failed(now, peer.leases.pop(request_id), request_id, FailureKind.CANCELLED))

    def _apply(self, event: Event) -> None:
        self.num_applied += 1
        self._fleet.apply(event)

    # Blocks of replicas that only a peer hears

    def _blocks(self, peer: Peer, item: wire.Blocks, now: float) -> None:
        replica_id = ReplicaId(item.replica_id)
        if not self._fleet.matches(replica_id, item.incarnation, item.space):
            return
        if item.op == "cleared" and self._blocks_asked.get(replica_id) is not None:
            self._sources.setdefault(replica_id, peer.gateway_id)
        if self._sources.get(replica_id) != peer.gateway_id:
            return
        match item.op:
            case "cleared":
                self._apply(BlocksCleared(now, replica_id))
            case "stored":
                self._apply(BlocksStored(now, replica_id, wire.unpack_keys(item.keys)))
            case "removed":
                self._apply(BlocksRemoved(now, replica_id, wire.unpack_keys(item.keys)))
            case "lost":
                self._lose(replica_id, now)
            case other:
                raise wire.WireError(f"an operation {other!r} on blocks")

    def _lose(self, replica_id: str, now: float) -> None:
        del self._sources[replica_id]
        self._blocks_asked.pop(replica_id, None)
        if replica_id in self._fleet.lacking():
            self._apply(FeedLost(now, ReplicaId(replica_id)))

    def _lose_sources(self, gateway_id: str, now: float) -> None:
        for replica_id in [r for r, source in self._sources.items() if source == gateway_id]:
            self._lose(replica_id, now)

    def heard_here(self, replica_id: ReplicaId) -> None:
        """Our own feed begins a picture of the replica: it needs no peer."""
        self._sources.pop(replica_id, None)
        self._blocks_asked.pop(replica_id, None)

    def follows(self, replica_id: str) -> bool:
        return replica_id in self._sources

    # Time

    def tick(self, now: float, hears: list[str]) -> wire.Beat:
        """Forget who is silent, and say what we know and want. `hears`: replicas whose events we have without a gap."""
        for peer in [p for p in self.peers.values() if now - p.heard_at > PEER_TTL_S]:
            self._forget(peer, now)
        asks = []
        for peer in self.peers.values():
            if not peer.whole and now - peer.asked_at >= ASK_AGAIN_S:
                peer.asked_at = now
                asks.append(peer.gateway_id)
        lacks = [str(replica_id) for replica_id in self._fleet.lacking()]
        return wire.Beat(hears, lacks, asks, self._ask_blocks(lacks, now))

    def _ask_blocks(self, lacks: list[str], now: float) -> list[tuple[str, str]]:
        asks = []
        for replica_id in lacks:
            if self.follows(replica_id) or now - self._blocks_asked.get(replica_id, float("-inf")) < ASK_AGAIN_S:
                continue
            source = min((p.gateway_id for p in self.peers.values() if replica_id in p.hears), default=None)
            if source is not None:
                self._blocks_asked[replica_id] = now
                asks.append((source, replica_id))
        return asks

    def wanted_blocks(self) -> frozenset[str]:
        """Replicas that some peer can't hear itself."""
        return frozenset().union(*(peer.lacks for peer in self.peers.values()))

    def is_first(self) -> bool:
        """Whether ours is the least id of those alive that don't ask for a snapshot themselves: who writes it."""
        return all(self.gateway_id < peer.gateway_id or peer.asks_index for peer in self.peers.values())

    def _forget(self, peer: Peer, now: float) -> None:
        for request_id in list(peer.leases):
            self._end(peer, request_id, now)
        self._lose_sources(peer.gateway_id, now)
        self.peers.pop(peer.gateway_id, None)

    def forget_all(self, now: float) -> None:
        for peer in list(self.peers.values()):
            self._forget(peer, now)

    def ask_all(self) -> None:
        """A replica is known only now: what peers have there was passed over."""
        for peer in self.peers.values():
            peer.whole = False
            peer.asked_at = float("-inf")

    @property
    def num_leases(self) -> int:
        return sum(len(peer.leases) for peer in self.peers.values())

    def check_invariants(self) -> None:
        assert len(self.peers) <= MAX_PEERS
        assert self.gateway_id not in self.peers
        for gateway_id, peer in self.peers.items():
            assert peer.gateway_id == gateway_id
            assert len(peer.leases) <= MAX_LEASES
            assert all(request_id.startswith(f"{gateway_id}:") for request_id in peer.leases)
        assert all(source in self.peers for source in self._sources.values())


__all__ = ["PEER_TTL_S", "Book", "Fleet", "Peer", "Requests"]
