"""The prefix index: how many leading blocks of a prompt each replica is expected to hold.

Theory. Every replica is mirrored by an LRU of its own size:

- A dispatch *pins* the prompt's blocks there (the engine cannot evict what a request uses) and predicts the missing
  ones. The first token proves them computed: they are confirmed. A request that fails before it refutes what was
  predicted for it alone.
- The finish unpins them at the young end of the LRU, the tail of the prompt to be evicted before its root.
- Above capacity, less what the outputs of running requests are thought to need, the oldest unpinned tails go.
- Where the replica publishes KV events it is *authoritative*: what it stores is confirmed, what it removes is gone,
  capacity is its own affair, and a prediction that no event confirmed within a grace after the finish expires. When
  its feed is lost, the mirror goes on as for any other replica.
- Realised cached tokens teach the mirror where there are no events: a request that falls short of blocks that were
  thought confirmed shrinks the capacity by 2 % (to a half at least where the capacity was told, since a mirror too
  small hurts more than one too large), and every one that does not lets it grow back a little. `trust` is the share
  of such blocks that came true lately; below 0.9 it scales predictions down, so that a replica which never reuses
  anything stops attracting anybody.

The keys and their holders live in block_runs.py, one replica's bookkeeping in mirror.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from policies.block_runs import Hold, RunTable
from policies.mirror import Mirror
from policies.types import BlockKey, ReplicaId

FULL_TRUST: Final = 0.9
FULL_SHARE: Final = 0.95  # from here on a mirror counts as full


class PrefixIndex:
    """`default_num_blocks` sizes the mirror of a replica that does not tell its capacity; `prediction_ttl_s` is the
    grace of an authoritative replica's unconfirmed predictions; `learns` False: capacities are what they were told."""

    def __init__(self, default_num_blocks: int = 16_384, prediction_ttl_s: float = 10.0, learns: bool = True) -> None:
        self._default_num_blocks = default_num_blocks
        self._learns = learns
        self._prediction_ttl_s = prediction_ttl_s
        self._next_expiry = inf
        self._table = RunTable()
        self._mirrors: dict[ReplicaId, Mirror] = {}
        self._replica_of: dict[int, ReplicaId] = {}
        self._num_slots = 0
        self._distrusted: dict[int, float] = {}  # slots whose matches are scaled down

    def __len__(self) -> int:
        """Distinct keys known."""
        return len(self._table)

    # Replicas

    def add(self, replica_id: ReplicaId, num_blocks: int = 0, default_num_blocks: int | None = None) -> None:
        """Mirror a replica with `num_blocks` of capacity (0: unknown)."""
        assert replica_id not in self._mirrors
        slot = next(s for s in range(len(self._replica_of) + 1) if s not in self._replica_of)
        guess = default_num_blocks or self._default_num_blocks
        self._mirrors[replica_id] = Mirror(self._table, slot, num_blocks or guess, num_blocks > 0, self._learns)
        self._replica_of[slot] = replica_id
        self._num_slots = max(self._replica_of) + 1

    def remove(self, replica_id: ReplicaId) -> None:
        """Forget the replica and all that it held."""
        self._mirrors[replica_id].drop_all(keep_pins=False)
        slot = self._mirrors.pop(replica_id).slot
        del self._replica_of[slot]
        self._distrusted.pop(slot, None)
        self._num_slots = max(self._replica_of, default=-1) + 1

    def resize(self, replica_id: ReplicaId, num_blocks: int) -> None:
        """The replica told its capacity. What was learned about it stays unless the figure changed."""
        mirror = self._mirrors[replica_id]
        if num_blocks > 0 and (num_blocks != mirror.nominal or not mirror.capacity_known):
            mirror.resize(num_blocks, known=True)
            mirror.evict()

    def reserve(self, replica_id: ReplicaId, num_blocks: int) -> None:
        """Blocks that running requests are thought to fill with output, which cannot hold prefixes."""
        mirror = self._mirrors[replica_id]
        mirror.reserved = num_blocks
        mirror.evict()

    def advance(self, now: float) -> None:
        """It is `now` (the time of an event)."""
        self._table.now = now

    # Look-up

    def slot(self, replica_id: ReplicaId) -> int:
        """Where `match_slots` has the replica."""
        return self._mirrors[replica_id].slot

    def match_slots(self, keys: tuple[BlockKey, ...]) -> list[int]:
        """Leading blocks of `keys` that the replica in each slot is expected to reuse."""
        matched = self._table.match(keys, self._num_slots)
        for slot, trust in self._distrusted.items():
            matched[slot] = int(matched[slot] * trust)
        return matched

    def nothing(self) -> list[int]:
        """What match_slots answers to an unknown prompt."""
        return [0] * self._num_slots

    def match(self, keys: tuple[BlockKey, ...]) -> dict[ReplicaId, int]:
        """The same by replica; those with none are left out."""
        matched = self.match_slots(keys)
        return {replica_id: matched[slot] for slot, replica_id in self._replica_of.items() if matched[slot]}

    def num_pins(self, key: BlockKey) -> int:
        """Requests under way, anywhere, whose prompts begin with all the blocks up to `key`."""
        run = self._table.where.get(key)
        num_pins = 0
        if run is not None:
            for hold in run.holds.values():
                num_pins += hold.num_pins
        return num_pins

    def num_blocks(self, replica_id: ReplicaId) -> int:
        return self._mirrors[replica_id].num_held

    def capacity(self, replica_id: ReplicaId) -> int:
        return int(self._mirrors[replica_id].capacity)

    def trust(self, replica_id: ReplicaId) -> float:
        return self._mirrors[replica_id].trust

    def authoritative(self, replica_id: ReplicaId) -> bool:
        return self._mirrors[replica_id].authoritative

    def idle_s(self, replica_id: ReplicaId) -> float | None:
        """How long blocks lie idle before the replica evicts them; None while it has room or none was seen to go."""
        mirror = self._mirrors[replica_id]
        return mirror.idle_s if mirror.num_held >= FULL_SHARE * mirror.room() else None

    # Requests

    def pin(self, replica_id: ReplicaId, keys: tuple[BlockKey, ...]) -> tuple[int, int]:
        """A request with this prompt was dispatched. Returns its leading blocks (held, confirmed) before that."""
        mirror = self._mirrors[replica_id]
        num_held = num_confirmed = position = 0
        for run in self._table.cover(keys):
            hold = mirror.hold(run)
            if position == num_held:
                num_held += hold.num_blocks
            if position == num_confirmed:
                num_confirmed += hold.num_confirmed
            position += len(run.keys)
            hold.num_pins += 1
            hold.used_at = self._table.now
            hold.unlink()
            hold.link_before(mirror.pinned)
            mirror.set_blocks(hold, len(run.keys))
        mirror.evict()
        return num_held, num_confirmed

    def computed(self, replica_id: ReplicaId, keys: tuple[BlockKey, ...]) -> None:
        """The first token came: the whole prompt is in the cache (events say so themselves where there are any)."""
        mirror = self._mirrors[replica_id]
        if not mirror.authoritative:
            for hold in mirror.path(keys):
                hold.num_confirmed = hold.num_blocks

    def unpin(
        self, replica_id: ReplicaId, keys: tuple[BlockKey, ...], now: float, keep_blocks: int | None = None
    ) -> None:
        """The request ended. With `keep_blocks` its prompt was not computed: what was predicted past them is refuted,
        unless confirmed or used by another request."""
        mirror = self._mirrors[replica_id]
        path = self._table.cover(keys)
        position = len(keys)
        for run in reversed(path):
            hold = run.holds[mirror.slot]
            position -= len(run.keys)
            assert hold.num_pins > 0
            hold.num_pins -= 1
            hold.used_at = now
            if hold.num_pins:
                continue
            hold.unlink()
            hold.link_before(mirror.lru)
            if keep_blocks is not None:
                kept = min(max(keep_blocks - position, hold.num_confirmed), hold.num_blocks)
                mirror.set_blocks(hold, kept)
            elif not hold.num_blocks:
                mirror.set_blocks(hold, 0)
            self._table.trim(run)
        if keep_blocks is None:
            self._table.join_path([run for run in path if run.keys], mirror.slot)
        if mirror.authoritative:
            mirror.expiries.append((now + self._prediction_ttl_s, tuple(keys)))
            self._next_expiry = min(self._next_expiry, mirror.expiries[0][0])
        mirror.evict()

    def realised(self, replica_id: ReplicaId, num_expected: int, num_cached: int) -> None:
        """A request reused `num_cached` blocks where `num_expected` were thought confirmed."""
        mirror = self._mirrors[replica_id]
        mirror.realised(num_expected, num_cached)
        self._judge(mirror)

    def _judge(self, mirror: Mirror) -> None:
        if mirror.trust < FULL_TRUST and not mirror.authoritative:
            self._distrusted[mirror.slot] = mirror.trust
        else:
            self._distrusted.pop(mirror.slot, None)

    # KV events

    def store(self, replica_id: ReplicaId, keys: Sequence[BlockKey]) -> None:
        """The replica says that it holds `keys`, consecutive blocks of one prompt, root side first."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative = not mirror.feed_lost
        self._judge(mirror)
        mirror.store(tuple(dict.fromkeys(keys)))
        mirror.evict()

    def discard(self, replica_id: ReplicaId, keys: Sequence[BlockKey]) -> None:
        """The replica says that it no longer holds `keys` (any blocks, in any order)."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative = not mirror.feed_lost
        self._judge(mirror)
        mirror.discard(keys)

    def recall(self, replica_id: ReplicaId, keys: Sequence[BlockKey], used_at: float) -> None:
        """Another gateway's picture has `keys`, consecutive blocks of one prompt. Pass the youngest first. A replica
        that tells of its cache itself knows better."""
        mirror = self._mirrors[replica_id]
        if not mirror.authoritative:
            mirror.recall(tuple(dict.fromkeys(keys)), used_at)

    def holds(self, replica_id: ReplicaId) -> list[Hold]:
        """All that the replica is expected to hold, the youngest first and the root of a prompt before its tail."""
        mirror = self._mirrors[replica_id]
        return [*mirror.pinned.ring(), *list(mirror.lru.ring())[::-1]]

    def clear(self, replica_id: ReplicaId) -> None:
        """The replica emptied its cache; requests in flight keep their pins. Its feed is whole again."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative, mirror.feed_lost = True, False
        self._judge(mirror)
        mirror.drop_all(keep_pins=True)

    def lose_feed(self, replica_id: ReplicaId) -> None:
        """Its events can't be relied on from here: mirror it by predictions until `clear`."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative, mirror.feed_lost = False, True
        self._judge(mirror)
        mirror.expiries.clear()
        mirror.evict()

    def expire(self, now: float) -> None:
        """Drop predictions whose grace is over. Cheap when there are none; call it before a look-up."""
        if now < self._next_expiry:
            return
        for mirror in self._mirrors.values():
            mirror.expire(now)
        self._next_expiry = min((m.expiries[0][0] for m in self._mirrors.values() if m.expiries), default=inf)

    def check_invariants(self) -> None:
        """The table's own, and every mirror's totals, pins and list against the holds of the table."""
        self._table.check_invariants()
        by_slot: dict[int, set[Hold]] = {slot: set() for slot in self._replica_of}
        for run in set(self._table.where.values()):
            for slot, hold in run.holds.items():
                by_slot[slot].add(hold)
        distrusted = [m for m in self._mirrors.values() if m.trust < FULL_TRUST and not m.authoritative]
        assert self._distrusted == {mirror.slot: mirror.trust for mirror in distrusted}
        for replica_id, mirror in self._mirrors.items():
            assert self._replica_of[mirror.slot] == replica_id
            holds = list(mirror.holds())
            assert len(holds) == len(set(holds))
            assert set(holds) == by_slot[mirror.slot], "a mirror and the table disagree about what is held"
            assert mirror.num_held == sum(hold.num_blocks for hold in holds)
            assert all(hold.num_pins for hold in mirror.pinned.ring())
            assert not any(hold.num_pins for hold in mirror.lru.ring())
            assert mirror.num_held <= mirror.limit() or mirror.lru.next is mirror.lru, "above capacity"
