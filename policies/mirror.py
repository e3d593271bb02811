"""One replica's cache as the router believes it to be: an LRU of its size over the runs of block_runs.py.

The rules (pins, predictions, events, learned capacity) are told in prefix_index.py; this is their bookkeeping. Every
change of a hold's size goes through `set_blocks`, which keeps totals, bits and confirmed counts right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from policies.block_runs import Hold, Run, RunTable, common_length
from policies.types import BlockKey

SHRINK: Final = 0.98
GROW: Final = 1.002
SHORTFALL_BLOCKS: Final = 4
FLOOR_KNOWN: Final = 0.5  # of a capacity that the replica told
FLOOR_GUESSED: Final = 1 / 32
TRUST_WEIGHT: Final = 0.2
IDLE_SHARE: Final = 0.1
AUTHORITATIVE_SLACK: Final = 2.0  # bound on what events may claim, in capacities


class Mirror:
    """`lru` and `pinned` are the sentinels of the replica's rings of holds; `lru.next` is the next to evict.

    capacity       blocks, as learned; `nominal` as told or guessed (`capacity_known`)
    learns         whether realised hits change the capacity
    reserved       blocks that the outputs of running requests are thought to take; half the capacity is never theirs
    trust          share of confirmed blocks that came true lately
    idle_s         how long blocks lay idle that were evicted lately (smoothed over a tenth of the capacity)
    authoritative  its KV events are complete; `feed_lost`: they were, and have a gap
    expiries       (when, prompt): predictions to drop unless confirmed by then
    """

    __slots__ = (
        "authoritative",
        "capacity",
        "capacity_known",
        "expiries",
        "feed_lost",
        "idle_s",
        "learns",
        "lru",
        "nominal",
        "num_held",
        "pinned",
        "reserved",
        "slot",
        "table",
        "trust",
    )

    def __init__(self, table: RunTable, slot: int, num_blocks: int, known: bool, learns: bool = True) -> None:
        self.table = table
        self.learns = learns
        self.slot = slot
        self.lru = Hold.sentinel(slot)
        self.pinned = Hold.sentinel(slot)
        self.num_held = 0
        self.reserved = 0
        self.trust = 1.0
        self.idle_s: float | None = None
        self.authoritative = False
        self.feed_lost = False
        self.expiries: deque[tuple[float, tuple[BlockKey, ...]]] = deque()
        self.resize(num_blocks, known)

    # Size

    def resize(self, num_blocks: int, known: bool) -> None:
        self.nominal = num_blocks
        self.capacity = float(num_blocks)
        self.capacity_known = known

    def limit(self) -> int:
        if self.authoritative:
            return int(self.nominal * AUTHORITATIVE_SLACK)
        return self.room()

    def room(self) -> int:
        """Blocks that prefixes may take."""
        return int(max(self.capacity - self.reserved, self.capacity / 2))

    def realised(self, num_expected: int, num_cached: int) -> None:
        """Learn from a request that reused `num_cached` blocks where `num_expected` were thought confirmed."""
        if self.authoritative or num_expected <= 0:
            return
        share = min(num_cached / num_expected, 1.0)
        self.trust += TRUST_WEIGHT * (share - self.trust)
        if not self.learns:
            return
        if num_expected - num_cached > SHORTFALL_BLOCKS:
            floor = FLOOR_KNOWN if self.capacity_known else FLOOR_GUESSED
            self.capacity = max(self.capacity * SHRINK, self.nominal * floor)
            self.evict()
        else:
            self.capacity = min(self.capacity * GROW, float(self.nominal))

    def evict(self) -> None:
        """Drop the oldest unpinned tails down to the limit."""
        limit = self.limit()
        while self.num_held > limit:
            hold = self.lru.next
            if hold is None or hold is self.lru:
                return  # all the rest is in use
            self._gone(hold, min(self.num_held - limit, hold.num_blocks))
            self.set_blocks(hold, max(hold.num_blocks - (self.num_held - limit), 0))
            self.table.trim(hold.run)

    def _gone(self, hold: Hold, num_blocks: int) -> None:
        """Blocks of `hold` were evicted: how long have they been idle?"""
        idle_s = max(self.table.now - hold.used_at, 0.0)
        if self.idle_s is None:
            self.idle_s = idle_s
        else:
            self.idle_s += num_blocks / (num_blocks + IDLE_SHARE * self.nominal) * (idle_s - self.idle_s)

    # Holds

    def holds(self) -> Iterator[Hold]:
        """Every hold, the pinned ones first."""
        yield from self.pinned.ring()
        yield from self.lru.ring()

    def hold(self, run: Run) -> Hold:
        """This replica's hold on `run`; a new one is empty and the youngest."""
        hold = run.holds.get(self.slot)
        if hold is None:
            hold = run.holds[self.slot] = Hold(run, self.slot)
            hold.used_at = self.table.now
            hold.link_before(self.lru)
        return hold

    def set_blocks(self, hold: Hold, num_blocks: int) -> None:
        """The hold has `num_blocks` leading blocks from now on; without any and unpinned it is gone."""
        run, bit = hold.run, 1 << hold.slot
        self.num_held += num_blocks - hold.num_blocks
        hold.num_blocks = num_blocks
        hold.num_confirmed = min(hold.num_confirmed, num_blocks)
        run.full = run.full | bit if num_blocks == len(run.keys) else run.full & ~bit
        if not num_blocks and not hold.num_pins:
            hold.unlink()
            run.holds.pop(hold.slot, None)

    def drop_all(self, keep_pins: bool) -> None:
        self.expiries.clear()
        for hold in self.holds():
            if not keep_pins:
                hold.num_pins = 0
            self.set_blocks(hold, 0)
            self.table.trim(hold.run)

    def path(self, keys: tuple[BlockKey, ...]) -> list[Hold]:
        """The holds along a prompt whose runs lie wholly within it, as far as the prompt is known."""
        found = []
        for _, run, offset, length in self.table.walk(keys):
            hold = run.holds.get(self.slot)
            if hold is not None and not offset and length == len(run.keys):
                found.append(hold)
        return found

    def expire(self, now: float) -> None:
        """Drop predictions whose grace is over and that no event confirmed."""
        while self.expiries and self.expiries[0][0] <= now:
            for hold in self.path(self.expiries.popleft()[1]):
                if not hold.num_pins and hold.num_confirmed < hold.num_blocks:
                    self.set_blocks(hold, hold.num_confirmed)
                    self.table.trim(hold.run)

    # KV events

    def store(self, keys: tuple[BlockKey, ...]) -> None:
        """`keys`, consecutive blocks of one prompt and each once, are confirmed; tails older than roots."""
        for run, offset, length in reversed(self._stretches(keys)):
            hold = self.hold(run)
            end = min(offset + length, len(run.keys))  # a run may have been split again by keys that are no chain
            if hold.num_confirmed >= offset:
                hold.num_confirmed = max(hold.num_confirmed, end)
            self.set_blocks(hold, max(hold.num_blocks, end))

    def recall(self, keys: tuple[BlockKey, ...], used_at: float) -> None:
        """Predict `keys` as the oldest holds here, while there is room: nothing is evicted for them."""
        if self.num_held + len(keys) > self.limit():
            return
        for run, offset, length in self._stretches(keys):
            if (hold := run.holds.get(self.slot)) is None:
                hold = run.holds[self.slot] = Hold(run, self.slot)
                hold.used_at = used_at
                assert self.lru.next is not None
                hold.link_before(self.lru.next)  # each before the one nearer to the root, so evicted before it
            self.set_blocks(hold, max(hold.num_blocks, min(offset + length, len(run.keys))))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """None of `keys` is held any more."""
        by_run: dict[Run, set[BlockKey]] = {}
        for key in keys:
            run = self.table.where.get(key)
            if run is not None and self.slot in run.holds:
                by_run.setdefault(run, set()).add(key)
        for run, gone in by_run.items():
            self._discard_from(run, gone)

    def _stretches(self, keys: tuple[BlockKey, ...]) -> list[tuple[Run, int, int]]:
        """Where `keys` belong, as (run, offset, length), such that a hold of offset + length says what is held.

        A stretch in the middle of a run of which the replica holds less than the offset is split off first.
        """
        stretches: list[tuple[Run, int, int]] = []
        position, table = 0, self.table
        while position < len(keys):
            run = table.where.get(keys[position])
            if run is None:
                end = position + 1
                while end < len(keys) and keys[end] not in table.where:
                    end += 1
                table.cover(keys[position:end])
                continue
            hold = run.holds.get(self.slot)
            confirmed, held = (hold.num_confirmed, hold.num_blocks) if hold else (0, 0)
            offset = table.offset(run, keys[position], guess=confirmed)
            if offset > min(confirmed, held):
                run, offset = table.split(run, offset), 0
            length = common_length(run.keys, offset, keys, position)
            stretches.append((run, offset, length))
            position += length
        return stretches

    def _discard_from(self, run: Run, gone: set[BlockKey]) -> None:
        hold = run.holds[self.slot]
        if not hold.num_pins:
            self._gone(hold, len(gone))
        while hold.num_blocks and run.keys[hold.num_blocks - 1] in gone:  # tails go first: the usual case
            gone.discard(run.keys[hold.num_blocks - 1])
            self.set_blocks(hold, hold.num_blocks - 1)
        if gone:
            self.table.trim(run)  # first: a split would hand a tail that nobody holds to another run
            self._punch_holes(run, [i for i in range(hold.num_blocks) if run.keys[i] in gone])
        self.table.trim(run)

    def _punch_holes(self, run: Run, places: list[int]) -> None:
        """Remove single blocks out of the middle: split there, from the back so that places stay true."""
        while places:
            last = first = places.pop()
            while places and places[-1] == first - 1:
                first = places.pop()
            if last + 1 < len(run.keys):
                self.table.split(run, last + 1)
            middle = self.table.split(run, first) if first else run
            self.set_blocks(middle.holds[self.slot], 0)
            self.table.trim(middle)
