"""What this gateway has to tell: its own events, in order, cut into messages; and its own leases, to list them all.

Events wait here until the next message. When they can't be sent they are dropped rather than kept: a complete list of
leases says more than an old backlog, and what is lost of the index is predictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.sharing import wire
from policies.block_runs import Hold
from policies.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Dispatched,
    Event,
    Failed,
    FeedLost,
    Finished,
    FirstToken,
)
from policies.types import ReplicaId

MAX_PENDING = 20_000
MESSAGE_BYTES = 256 * 1024
LISTED_KEY_BYTES = 1024 * 1024  # of all leases in a list; the others are listed without their blocks
_BLOCKS_AN_ITEM = 4096

Identity = tuple[str, str]  # incarnation and key space of a replica


@dataclass(slots=True)
class OwnLease:
    event: Dispatched
    identity: Identity
    first_at: float | None = None


class Outbox:
    """`identity` names a replica's process and cut as of now."""

    def __init__(self, identity: Callable[[ReplicaId], Identity]) -> None:
        self._identity = identity
        self._pending: deque[tuple[Event, Identity] | wire.Item] = deque()
        self.leases: dict[str, OwnLease] = {}
        self.lists_leases = False  # a complete list is due
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, event: Event, is_up: bool) -> bool:
        """An event of ours. Returns whether it waits here now; while Redis is down only leases are kept."""
        match event:
            case Dispatched():
                identity = self._identity(event.replica_id)
                self.leases[event.request_id] = OwnLease(event, identity)
                return self._put(event, identity, is_up)
            case FirstToken():
                lease = self.leases.get(event.request_id)
                if lease is not None:
                    lease.first_at = event.at
            case Finished() | Failed():
                self.leases.pop(event.request_id, None)
            case BlocksStored() | BlocksRemoved() | BlocksCleared() | FeedLost():
                return self._put(event, self._identity(event.replica_id), is_up)
            case _:
                return False
        return self._put(event, ("", ""), is_up)

    def _put(self, event: Event, identity: Identity, is_up: bool) -> bool:
        if not is_up:
            self.lists_leases = True
            self.num_dropped += 1
            return False
        if len(self._pending) >= MAX_PENDING:
            self.drop()
        self._pending.append((event, identity))
        return True

    def drop(self) -> None:
        """What waits can't be told: list the leases instead, when that is possible again."""
        self.num_dropped += len(self._pending)
        self._pending.clear()
        self.lists_leases = True

    def add_blocks(self, replica_id: ReplicaId, holds: list[Hold]) -> None:
        """All that is confirmed of a replica, for a peer that can't hear it. Call it when nothing else waits here, so
        that the deltas after it are complete."""
        assert not self._pending
        identity = self._identity(replica_id)
        self._pending.append(wire.Blocks(replica_id, *identity, "cleared"))
        for hold in reversed(holds):  # the oldest first, as they would have been stored
            for start in range(0, hold.num_confirmed, _BLOCKS_AN_ITEM):
                keys = hold.run.keys[start : min(start + _BLOCKS_AN_ITEM, hold.num_confirmed)]
                self._pending.append(wire.Blocks(replica_id, *identity, "stored", wire.pack_keys(keys)))

    def take(self, now: float) -> list[wire.Item]:
        """The next message's items: about MESSAGE_BYTES at most."""
        items: list[wire.Item] = []
        size = 0
        while self._pending and size < MESSAGE_BYTES and len(items) < wire.MAX_ITEMS // 2:
            entry = self._pending.popleft()
            item = _item(*entry, now) if isinstance(entry, tuple) else entry
            items.append(item)
            size += 64 + len(item.keys) if isinstance(item, wire.Dispatch | wire.Blocks) else 64
        if self.lists_leases and not self._pending:
            items.append(self._list(now))
            self.lists_leases = False
        return items

    def _list(self, now: float) -> wire.Leases:
        listed, room = [], LISTED_KEY_BYTES
        for lease in list(self.leases.values())[: wire.MAX_ITEMS]:
            first_age_s = None if lease.first_at is None else _age(now, lease.first_at)
            item = _dispatch(lease.event, lease.identity, now, first_age_s, with_keys=room > 0)
            room -= len(item.keys)
            listed.append(item)
        return wire.Leases(listed)


def _age(now: float, at: float) -> float:
    return min(max(now - at, 0.0), 86_400.0)


def _item(event: Event, identity: Identity, now: float) -> wire.Item:
    match event:
        case Dispatched():
            return _dispatch(event, identity, now)
        case FirstToken():
            return wire.First(_age(now, event.at), event.request_id, event.replica_id, event.cached_tokens)
        case Finished():
            return wire.Finish(
                _age(now, event.at), event.request_id, event.replica_id, event.num_output_tokens, event.cached_tokens,
                event.num_prompt_tokens,
            )  # fmt: skip
        case Failed():
            return wire.Fail(_age(now, event.at), event.request_id, event.replica_id, event.kind.value)
        case BlocksStored():
            return wire.Blocks(event.replica_id, *identity, "stored", wire.pack_keys(event.keys))
        case BlocksRemoved():
            return wire.Blocks(event.replica_id, *identity, "removed", wire.pack_keys(event.keys))
        case BlocksCleared():
            return wire.Blocks(event.replica_id, *identity, "cleared")
        case FeedLost():
            return wire.Blocks(event.replica_id, *identity, "lost")
        case _:
            raise AssertionError(f"{type(event).__name__} is not shared")


def _dispatch(
    event: Dispatched, identity: Identity, now: float, first_age_s: float | None = None, with_keys: bool = True
) -> wire.Dispatch:
    chain = event.chain
    return wire.Dispatch(
        _age(now, event.at), event.request_id, event.replica_id, *identity,
        wire.pack_keys(chain.keys) if with_keys else b"", chain.block_tokens, chain.num_tokens, event.matched_tokens,
        event.streamed, event.session, first_age_s,
    )  # fmt: skip
