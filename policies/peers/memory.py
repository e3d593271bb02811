"""What a rule remembers of each replica, for as long as the process behind it lives.

Most peers keep an approximate picture of every replica's cache from what they sent there. Keys are chained (a key
names the whole prefix), so a radix tree over prompts is here a plain set of keys a replica: whoever holds a key holds
its parents, and the longest match is found by bisection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Generic, TypeVar

from policies.events import Event, Joined, Left, Restarted
from policies.types import BlockKey, FleetSnapshot, PrefixChain, ReplicaId, ReplicaView, RouteRequest

_S = TypeVar("_S")


class ReplicaMemory(Generic[_S]):
    """One state a replica, made by `make` from its description; a new process or key space starts afresh.

    `forget`, if given, is told of every state that goes.
    """

    def __init__(self, make: Callable[[Joined], _S], forget: Callable[[ReplicaId], None] | None = None) -> None:
        self._make = make
        self._forget = forget
        self._joined: dict[ReplicaId, Joined] = {}
        self._states: dict[ReplicaId, _S] = {}

    def observe(self, event: Event) -> None:
        """Follow who is there. Other events don't matter here."""
        if isinstance(event, Joined):
            known = self._joined.get(event.replica_id)
            if known is None or (known.incarnation, known.key_space) != (event.incarnation, event.key_space):
                self._begin(event)
            else:
                self._joined[event.replica_id] = event
        elif isinstance(event, Restarted):
            known = self._joined.get(event.replica_id)
            if known is not None:
                num_blocks = event.num_blocks or known.num_blocks
                self._begin(replace(known, incarnation=event.incarnation, num_blocks=num_blocks))
        elif isinstance(event, Left) and event.replica_id in self._joined:
            self._end(event.replica_id)

    def _begin(self, joined: Joined) -> None:
        if joined.replica_id in self._joined:
            self._end(joined.replica_id)
        self._joined[joined.replica_id] = joined
        self._states[joined.replica_id] = self._make(joined)

    def _end(self, replica_id: ReplicaId) -> None:
        del self._joined[replica_id]
        del self._states[replica_id]
        if self._forget is not None:
            self._forget(replica_id)

    def get(self, replica_id: ReplicaId) -> _S | None:
        return self._states.get(replica_id)

    def joined(self, replica_id: ReplicaId) -> Joined | None:
        return self._joined.get(replica_id)

    def items(self) -> Iterator[tuple[ReplicaId, _S]]:
        yield from self._states.items()

    def chain(self, request: RouteRequest, replica_id: ReplicaId) -> PrefixChain | None:
        """The request's prompt in the replica's key space; None when it has none there."""
        joined = self._joined.get(replica_id)
        return None if joined is None else request.chains.get(joined.key_space)

    def check_invariants(self) -> None:
        assert self._joined.keys() == self._states.keys()
        assert all(replica_id == joined.replica_id for replica_id, joined in self._joined.items())


class HeldPrefixes:
    """The keys that one replica is thought to hold, least recently used first and tails before their roots."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """The replica was given this prompt: all of it is held and the youngest."""
        held = self._held
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Leading blocks of `keys` that are held."""
        return leading(self._held, keys)

    def oldest(self, count: int) -> Iterator[BlockKey]:
        """The next `count` to go."""
        return islice(self._held, count)

    def evict_to(self, limit: int) -> None:
        while len(self._held) > limit:
            self._held.popitem(last=False)


def leading(held: Container[BlockKey], keys: Sequence[BlockKey]) -> int:
    """How many leading `keys` are in `held` (any container), which holds a key's parents wherever it holds the key."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


def matched_tokens(
    memory: ReplicaMemory[HeldPrefixes], request: RouteRequest, fleet: FleetSnapshot
) -> list[tuple[ReplicaView, int]]:
    """Every candidate and the prompt tokens that it is thought to hold, by this memory alone."""
    found = []
    for view in fleet.replicas:
        held, chain = memory.get(view.replica_id), memory.chain(request, view.replica_id)
        tokens = 0
        if held is not None and chain is not None:
            tokens = held.match(chain.keys) * chain.block_tokens
        found.append((view, tokens))
    return found


def no_prefixes(_: Joined) -> HeldPrefixes:
    """For ReplicaMemory: a new replica holds nothing."""
    return HeldPrefixes()
