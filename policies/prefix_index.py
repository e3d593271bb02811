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

The keys and their holders live in block_runs.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf

from policies.block_runs import Hold, Run, RunTable, common_length
from policies.types import BlockKey, ReplicaId

SHRINK = 0.98
GROW = 1.002
SHORTFALL_BLOCKS = 4
FLOOR_KNOWN = 0.5  # of a capacity that the replica told
FLOOR_GUESSED = 1 / 32
TRUST_WEIGHT = 0.2
FULL_TRUST = 0.9
AUTHORITATIVE_SLACK = 2.0  # bound on what events may claim, in capacities


class Mirror:
    """One replica's LRU. `lru.next` is the next hold to evict; the list is a ring through the sentinel `lru`."""

    __slots__ = (
        "authoritative",
        "capacity",
        "capacity_known",
        "expiries",
        "feed_lost",
        "lru",
        "nominal",
        "num_held",
        "pinned",
        "reserved",
        "slot",
        "trust",
    )

    def __init__(self, slot: int, num_blocks: int, known: bool) -> None:
        self.slot = slot
        self.lru = Hold(Run([]), slot)
        self.lru.prev = self.lru.next = self.lru
        self.pinned: set[Hold] = set()
        self.num_held = 0
        self.reserved = 0
        self.trust = 1.0
        self.authoritative = False
        self.feed_lost = False
        self.expiries: deque[tuple[float, tuple[BlockKey, ...]]] = deque()
        self.resize(num_blocks, known)

    def resize(self, num_blocks: int, known: bool) -> None:
        self.nominal = num_blocks
        self.capacity = float(num_blocks)
        self.capacity_known = known

    def limit(self) -> int:
        if self.authoritative:
            return int(self.nominal * AUTHORITATIVE_SLACK)
        return max(int(self.capacity) - self.reserved, 0)

    def holds(self) -> Iterator[Hold]:
        """Every hold: the pinned ones, then the list from old to young. Safe against removing the one given."""
        yield from tuple(self.pinned)
        hold = self.lru.next
        while hold is not None and hold is not self.lru:
            following = hold.next
            yield hold
            hold = following


class PrefixIndex:
    """`default_num_blocks` sizes the mirror of a replica that does not tell its capacity; `prediction_ttl_s` is the
    grace of an authoritative replica's unconfirmed predictions."""

    def __init__(self, default_num_blocks: int = 16_384, prediction_ttl_s: float = 10.0) -> None:
        self._default_num_blocks = default_num_blocks
        self._prediction_ttl_s = prediction_ttl_s
        self._next_expiry = inf
        self._table = RunTable()
        self._mirrors: dict[ReplicaId, Mirror] = {}
        self._replica_of: dict[int, ReplicaId] = {}

    def __len__(self) -> int:
        """Distinct keys known."""
        return len(self._table)

    # Replicas

    def add(self, replica_id: ReplicaId, num_blocks: int = 0, default_num_blocks: int | None = None) -> None:
        """Mirror a replica with `num_blocks` of capacity (0: unknown)."""
        assert replica_id not in self._mirrors
        slot = next(s for s in range(len(self._replica_of) + 1) if s not in self._replica_of)
        guess = default_num_blocks or self._default_num_blocks
        self._mirrors[replica_id] = Mirror(slot, num_blocks or guess, num_blocks > 0)
        self._replica_of[slot] = replica_id

    def remove(self, replica_id: ReplicaId) -> None:
        """Forget the replica and all that it held."""
        self._drop_all(self._mirrors[replica_id], keep_pins=False)
        del self._replica_of[self._mirrors.pop(replica_id).slot]

    def resize(self, replica_id: ReplicaId, num_blocks: int) -> None:
        """The replica told its capacity. What was learned about it stays unless the figure changed."""
        mirror = self._mirrors[replica_id]
        if num_blocks > 0 and (num_blocks != mirror.nominal or not mirror.capacity_known):
            mirror.resize(num_blocks, known=True)
            self._evict(mirror)

    def reserve(self, replica_id: ReplicaId, num_blocks: int) -> None:
        """Blocks that running requests are thought to fill with output, which cannot hold prefixes."""
        mirror = self._mirrors[replica_id]
        mirror.reserved = num_blocks
        self._evict(mirror)

    # Look-up

    def match(self, keys: Sequence[BlockKey]) -> dict[ReplicaId, int]:
        """Leading blocks of `keys` that each replica is expected to reuse; replicas with none are left out."""
        matched: dict[ReplicaId, int] = {}
        for slot, num_blocks in self._table.match(keys).items():
            replica_id = self._replica_of[slot]
            mirror = self._mirrors[replica_id]
            if mirror.trust < FULL_TRUST and not mirror.authoritative:
                num_blocks = int(num_blocks * mirror.trust)
            if num_blocks:
                matched[replica_id] = num_blocks
        return matched

    def num_blocks(self, replica_id: ReplicaId) -> int:
        return self._mirrors[replica_id].num_held

    def capacity(self, replica_id: ReplicaId) -> int:
        return int(self._mirrors[replica_id].capacity)

    def trust(self, replica_id: ReplicaId) -> float:
        return self._mirrors[replica_id].trust

    def authoritative(self, replica_id: ReplicaId) -> bool:
        return self._mirrors[replica_id].authoritative

    # Requests

    def pin(self, replica_id: ReplicaId, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """A request with this prompt was dispatched. Returns its leading blocks (held, confirmed) before that."""
        mirror = self._mirrors[replica_id]
        num_held = num_confirmed = position = 0
        for run in self._table.cover(keys):
            hold = run.holds.get(mirror.slot) or self._new_hold(run, mirror)
            if position == num_held:
                num_held += hold.num_blocks
            if position == num_confirmed:
                num_confirmed += hold.num_confirmed
            position += len(run.keys)
            hold.num_pins += 1
            hold.unlink()
            mirror.pinned.add(hold)
            self._set_blocks(hold, mirror, len(run.keys))
        self._evict(mirror)
        return num_held, num_confirmed

    def computed(self, replica_id: ReplicaId, keys: Sequence[BlockKey]) -> None:
        """The first token came: the whole prompt is in the cache (events say so themselves where there are any)."""
        mirror = self._mirrors[replica_id]
        if not mirror.authoritative:
            for hold in self._path_holds(mirror, keys):
                hold.num_confirmed = hold.num_blocks

    def unpin(
        self, replica_id: ReplicaId, keys: Sequence[BlockKey], now: float, keep_blocks: int | None = None
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
            if hold.num_pins:
                continue
            mirror.pinned.discard(hold)
            hold.link_before(mirror.lru)
            if keep_blocks is not None:
                kept = min(max(keep_blocks - position, hold.num_confirmed), hold.num_blocks)
                self._set_blocks(hold, mirror, kept)
            elif not hold.num_blocks:
                self._set_blocks(hold, mirror, 0)
            self._table.trim(run)
        if keep_blocks is None:
            self._table.join_path([run for run in path if run.keys], mirror.slot)
        if mirror.authoritative:
            mirror.expiries.append((now + self._prediction_ttl_s, tuple(keys)))
            self._next_expiry = min(self._next_expiry, mirror.expiries[0][0])
        self._evict(mirror)

    def realised(self, replica_id: ReplicaId, num_expected: int, num_cached: int) -> None:
        """A request reused `num_cached` blocks where `num_expected` were thought confirmed."""
        mirror = self._mirrors[replica_id]
        if mirror.authoritative or num_expected <= 0:
            return
        share = min(num_cached / num_expected, 1.0)
        mirror.trust += TRUST_WEIGHT * (share - mirror.trust)
        if num_expected - num_cached > SHORTFALL_BLOCKS:
            floor = FLOOR_KNOWN if mirror.capacity_known else FLOOR_GUESSED
            mirror.capacity = max(mirror.capacity * SHRINK, mirror.nominal * floor)
            self._evict(mirror)
        else:
            mirror.capacity = min(mirror.capacity * GROW, float(mirror.nominal))

    # KV events

    def store(self, replica_id: ReplicaId, keys: Sequence[BlockKey]) -> None:
        """The replica says that it holds `keys`, consecutive blocks of one prompt, root side first."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative = not mirror.feed_lost
        stretches = self._stretches(mirror, tuple(dict.fromkeys(keys)))
        for run, offset, length in reversed(stretches):
            hold = run.holds.get(mirror.slot) or self._new_hold(run, mirror)
            end = min(offset + length, len(run.keys))  # a run may have been split again by keys that are no chain
            if hold.num_confirmed >= offset:
                hold.num_confirmed = max(hold.num_confirmed, end)
            self._set_blocks(hold, mirror, max(hold.num_blocks, end))
        self._evict(mirror)

    def discard(self, replica_id: ReplicaId, keys: Sequence[BlockKey]) -> None:
        """The replica says that it no longer holds `keys` (any blocks, in any order)."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative = not mirror.feed_lost
        by_run: dict[Run, set[BlockKey]] = {}
        for key in keys:
            run = self._table.where.get(key)
            if run is not None and mirror.slot in run.holds:
                by_run.setdefault(run, set()).add(key)
        for run, gone in by_run.items():
            self._discard_from(mirror, run, gone)

    def clear(self, replica_id: ReplicaId) -> None:
        """The replica emptied its cache; requests in flight keep their pins. Its feed is whole again."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative, mirror.feed_lost = True, False
        self._drop_all(mirror, keep_pins=True)

    def lose_feed(self, replica_id: ReplicaId) -> None:
        """Its events can't be relied on from here: mirror it by predictions until `clear`."""
        mirror = self._mirrors[replica_id]
        mirror.authoritative, mirror.feed_lost = False, True
        mirror.expiries.clear()
        self._evict(mirror)

    def expire(self, now: float) -> None:
        """Drop predictions whose grace is over. Cheap when there are none; call it before a look-up."""
        if now < self._next_expiry:
            return
        for mirror in self._mirrors.values():
            while mirror.expiries and mirror.expiries[0][0] <= now:
                for hold in self._path_holds(mirror, mirror.expiries.popleft()[1]):
                    if not hold.num_pins and hold.num_confirmed < hold.num_blocks:
                        self._set_blocks(hold, mirror, hold.num_confirmed)
                        self._table.trim(hold.run)
        self._next_expiry = min((m.expiries[0][0] for m in self._mirrors.values() if m.expiries), default=inf)

    def check_invariants(self) -> None:
        """The table's own, and every mirror's totals, pins and list against the holds of the table."""
        self._table.check_invariants()
        by_slot: dict[int, set[Hold]] = {slot: set() for slot in self._replica_of}
        for run in set(self._table.where.values()):
            for slot, hold in run.holds.items():
                by_slot[slot].add(hold)
        for replica_id, mirror in self._mirrors.items():
            assert self._replica_of[mirror.slot] == replica_id
            holds = list(mirror.holds())
            assert len(holds) == len(set(holds))
            assert set(holds) == by_slot[mirror.slot], "a mirror and the table disagree about what is held"
            assert mirror.num_held == sum(hold.num_blocks for hold in holds)
            assert mirror.pinned == {hold for hold in holds if hold.num_pins}
            assert mirror.num_held <= mirror.limit() or not any(hold.linked for hold in holds), "above capacity"

    # Inside

    def _new_hold(self, run: Run, mirror: Mirror) -> Hold:
        hold = run.holds[mirror.slot] = Hold(run, mirror.slot)
        hold.link_before(mirror.lru)
        return hold

    def _set_blocks(self, hold: Hold, mirror: Mirror, num_blocks: int) -> None:
        """The one place where a hold's size changes: keeps the totals, the bits and the confirmed count right."""
        run, bit = hold.run, 1 << hold.slot
        mirror.num_held += num_blocks - hold.num_blocks
        hold.num_blocks = num_blocks
        hold.num_confirmed = min(hold.num_confirmed, num_blocks)
        run.full = run.full | bit if num_blocks == len(run.keys) else run.full & ~bit
        if not num_blocks and not hold.num_pins:
            hold.unlink()
            run.holds.pop(hold.slot, None)

    def _evict(self, mirror: Mirror) -> None:
        limit = mirror.limit()
        while mirror.num_held > limit:
            hold = mirror.lru.next
            if hold is None or hold is mirror.lru:
                return  # all the rest is in use
            excess = mirror.num_held - limit
            self._set_blocks(hold, mirror, max(hold.num_blocks - excess, 0))
            self._table.trim(hold.run)

    def _drop_all(self, mirror: Mirror, keep_pins: bool) -> None:
        mirror.expiries.clear()
        for hold in mirror.holds():
            if not keep_pins:
                hold.num_pins = 0
            self._set_blocks(hold, mirror, 0)
            self._table.trim(hold.run)
        if not keep_pins:
            mirror.pinned.clear()

    def _path_holds(self, mirror: Mirror, keys: Sequence[BlockKey]) -> list[Hold]:
        """The replica's holds along a prompt, as far as they are known and whole within it."""
        found = []
        for _, run, offset, length in self._table.walk(keys):
            hold = run.holds.get(mirror.slot)
            if hold is not None and not offset and (length == len(run.keys)):
                found.append(hold)
        return found

    def _stretches(self, mirror: Mirror, keys: Sequence[BlockKey]) -> list[tuple[Run, int, int]]:
        """Where `keys` belong, as (run, offset, length), such that a hold of offset + length says what is held.

        A stretch in the middle of a run of which the replica holds less than the offset is split off first.
        """
        stretches: list[tuple[Run, int, int]] = []
        position, table = 0, self._table
        while position < len(keys):
            run = table.where.get(keys[position])
            if run is None:
                end = position + 1
                while end < len(keys) and keys[end] not in table.where:
                    end += 1
                table.cover(keys[position:end])
                continue
            hold = run.holds.get(mirror.slot)
            confirmed, held = (hold.num_confirmed, hold.num_blocks) if hold else (0, 0)
            offset = table.offset(run, keys[position], guess=confirmed)
            if offset > min(confirmed, held):
                run, offset = table.split(run, offset), 0
            length = common_length(run.keys, offset, keys, position)
            stretches.append((run, offset, length))
            position += length
        return stretches

    def _discard_from(self, mirror: Mirror, run: Run, gone: set[BlockKey]) -> None:
        hold = run.holds[mirror.slot]
        while hold.num_blocks and run.keys[hold.num_blocks - 1] in gone:  # tails go first: the usual case
            gone.discard(run.keys[hold.num_blocks - 1])
            self._set_blocks(hold, mirror, hold.num_blocks - 1)
        if gone:
            self._punch_holes(mirror, run, [i for i in range(hold.num_blocks) if run.keys[i] in gone])
        self._table.trim(run)

    def _punch_holes(self, mirror: Mirror, run: Run, places: list[int]) -> None:
        """Remove single blocks out of the middle: split there, from the back so that places stay true."""
        while places:
            last = first = places.pop()
            while places and places[-1] == first - 1:
                first = places.pop()
            if last + 1 < len(run.keys):
                self._table.split(run, last + 1)
            middle = self._table.split(run, first) if first else run
            self._set_blocks(middle.holds[mirror.slot], mirror, 0)
            self._table.trim(middle)
