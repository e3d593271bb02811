"""A consistent-hash ring with virtual nodes, as a pure function of the candidates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

import xxhash

from policies.types import BlockKey, ReplicaId


def hash_of(text: str, seed: int = 0) -> int:
    return xxhash.xxh64_intdigest(text.encode(), seed)


def key_hash(key: BlockKey, seed: int = 0) -> int:
    """Where a prefix lies on the ring."""
    return xxhash.xxh64_intdigest(key.to_bytes(16, "little"), seed)


@lru_cache(maxsize=64)
def ring_of(replica_ids: tuple[ReplicaId, ...], num_points: int, seed: int = 0) -> tuple[tuple[int, ReplicaId], ...]:
    """`num_points` points for each replica, in the order of their hashes. Remembered: candidates seldom change."""
    points = ((hash_of(f"{name}{i}", seed), name) for name in replica_ids for i in range(num_points))
    return tuple(sorted(points))


def clockwise(ring: tuple[tuple[int, ReplicaId], ...], at: int) -> Iterator[ReplicaId]:
    """The distinct replicas met from `at` onwards, once round."""
    start = bisect_left(ring, (at, ""))
    seen: set[ReplicaId] = set()
    for _, name in (*ring[start:], *ring[:start]):
        if name not in seen:
            seen.add(name)
            yield name
