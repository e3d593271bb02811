"""Which replica holds which blocks, kept as runs.

Theory. A block key names a whole prefix, so keys that were cut from one prompt stay neighbours for ever. Instead of an
entry for every (block, replica) the table keeps *runs*: stretches of consecutive keys that have so far always been
used together. A run is split where two prompts part, where a prompt ends or where a replica lost a block in its
middle, and joined again when nothing distinguishes the halves. What a replica holds of a run is one number, the count
of leading blocks (engines free tails first), so everything that happens to a prompt of ten thousand blocks costs steps
in proportion to its runs (its turns), not its blocks. A block costs one dict slot and one list slot; the rest is paid
per run.

Matching walks the prompt from run to run: the last key of a run equal to the prompt's key at that place proves the
whole run equal, and where they differ the fork is found by bisection. Holes need no special care: the walk stops a
replica at the first block that it lacks. Replicas are bits of an integer while walking.

Each replica's holds also form its LRU list: least recently used first, and within one prompt the tail before the root.
Pinned holds (requests in flight) stand outside it, in a ring of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from policies.types import BlockKey


class Hold:
    """What one replica holds of one run.

    num_blocks     leading blocks held, `num_confirmed` of them known to exist and the others predicted
    num_pins       requests in flight here whose prompt covers the run
    used_at        when it was last pinned, unpinned or stored
    prev, next     neighbours in one of the replica's two rings: pinned holds, or the others from old to young
    """

    __slots__ = ("next", "num_blocks", "num_confirmed", "num_pins", "prev", "run", "slot", "used_at")

    def __init__(self, run: Run, slot: int) -> None:
        self.run = run
        self.slot = slot
        self.num_blocks = 0
        self.num_confirmed = 0
        self.num_pins = 0
        self.used_at = 0.0
        self.prev: Hold | None = None
        self.next: Hold | None = None

    def link_before(self, other: Hold) -> None:
        """Enter the list of `other` right before it (so right before it in the order of eviction)."""
        assert self.next is None
        assert other.prev is not None
        self.prev, self.next = other.prev, other
        self.prev.next = self
        other.prev = self

    def unlink(self) -> None:
        assert self.next is not None
        assert self.prev is not None
        self.prev.next, self.next.prev = self.next, self.prev
        self.prev = self.next = None

    def ring(self) -> Iterator[Hold]:
        """The holds of the ring whose sentinel this is, the first to go first. The one given may be unlinked."""
        hold = self.next
        while hold is not None and hold is not self:
            following = hold.next
            yield hold
            hold = following

    @classmethod
    def sentinel(cls, slot: int) -> Hold:
        """The fixed point of an empty ring."""
        hold = cls(Run([]), slot)
        hold.prev = hold.next = hold
        return hold


class Run:
    """Consecutive block keys, root side first, and who holds how much of them.

    `full` has the bit of every slot that holds the whole run. `forked`: prompts have parted at its end, so joining it
    with one continuation would only have to be undone.
    """

    __slots__ = ("forked", "full", "holds", "keys")

    def __init__(self, keys: list[BlockKey]) -> None:
        self.keys = keys
        self.holds: dict[int, Hold] = {}
        self.full = 0
        self.forked = False

    def refresh_full(self) -> None:
        size = len(self.keys)
        self.full = sum(1 << slot for slot, hold in self.holds.items() if hold.num_blocks == size)


class RunTable:
    """Every known key in exactly one run. Knows nothing of capacities; prefix_index.py does."""

    __slots__ = ("now", "where")

    def __init__(self) -> None:
        self.where: dict[BlockKey, Run] = {}
        self.now = 0.0  # the time of the last event: nothing here has a clock

    def __len__(self) -> int:
        return len(self.where)

    def match(self, keys: tuple[BlockKey, ...], num_slots: int) -> list[int]:
        """Leading blocks of `keys` held by each slot below `num_slots`."""
        matched = [0] * num_slots
        alive = -1  # everyone, until the first run names its holders
        position, size = 0, len(keys)
        while alive and position < size:  # the loop of `walk`: this is the hot path
            run = self.where.get(keys[position])
            if run is None:
                break
            offset = self.offset(run, keys[position])
            length = common_length(run.keys, offset, keys, position)
            staying = run.full if offset + length == len(run.keys) else _holders_of(run, offset + length)
            if alive < 0:
                alive = _mask_of(run)
            dropped = alive & ~staying
            if dropped:
                if position:
                    for slot in slots_of(dropped):
                        matched[slot] = position
                for slot, hold in run.holds.items():
                    if dropped >> slot & 1 and hold.num_blocks > offset:
                        matched[slot] = position + hold.num_blocks - offset
            alive &= staying
            position += length
        if alive > 0:
            for slot in slots_of(alive):
                matched[slot] = position
        return matched

    def walk(self, keys: tuple[BlockKey, ...]) -> Iterator[tuple[int, Run, int, int]]:
        """(position in keys, run, offset in run, length) of each known stretch, up to the first unknown key."""
        position, size = 0, len(keys)
        while position < size:
            run = self.where.get(keys[position])
            if run is None:
                return
            offset = self.offset(run, keys[position])
            length = common_length(run.keys, offset, keys, position)
            yield position, run, offset, length
            position += length

    def offset(self, run: Run, key: BlockKey, guess: int = 0) -> int:
        """Where `key` is in `run`: at once at either end or at `guess`, else by a scan."""
        keys = run.keys
        if keys[0] == key:
            return 0
        if guess < len(keys) and keys[guess] == key:
            return guess
        return len(keys) - 1 if keys[-1] == key else keys.index(key)

    def cover(self, keys: tuple[BlockKey, ...]) -> list[Run]:
        """The runs that make up exactly `keys`: unknown keys become runs, runs are split where the prompt parts."""
        where, path, position, size = self.where, [], 0, len(keys)
        while position < size:
            run = where.get(keys[position])
            if run is None:
                end = position + 1
                while end < size and keys[end] not in where:
                    end += 1
                run = Run(list(keys[position:end]))
                for key in run.keys:
                    where[key] = run
                path.append(run)
                position = end
                continue
            offset = self.offset(run, keys[position])
            if offset:
                run = self.split(run, offset)
            length = common_length(run.keys, 0, keys, position)
            if length < len(run.keys):
                self.split(run, length)
                run.forked = position + length < size
            path.append(run)
            position += length
        return path

    def split(self, run: Run, at: int) -> Run:
        """Cut `run` before block `at`; it keeps the head. Returns the tail, evicted before the head everywhere."""
        assert 0 < at < len(run.keys)
        tail = Run(run.keys[at:])
        del run.keys[at:]
        tail.forked, run.forked = run.forked, False
        self.where.update(dict.fromkeys(tail.keys, tail))
        for slot, hold in run.holds.items():
            beyond = hold.num_blocks - at
            if beyond <= 0 and not hold.num_pins:
                continue
            half = Hold(tail, slot)
            half.num_blocks = max(beyond, 0)
            half.num_confirmed = max(hold.num_confirmed - at, 0)
            half.num_pins, half.used_at = hold.num_pins, hold.used_at
            hold.num_blocks = min(hold.num_blocks, at)
            hold.num_confirmed = min(hold.num_confirmed, at)
            tail.holds[slot] = half
            half.link_before(hold)
        run.refresh_full()
        tail.refresh_full()
        return tail

    def join_path(self, path: list[Run], slot: int) -> None:
        """Join neighbours on a prompt's path that only `slot` holds, whole and unpinned."""
        head = None
        for run in path:
            if head is not None and not head.forked and _joinable(head, run, slot):
                self._join(head, run, slot)
            else:
                head = run

    def _join(self, head: Run, tail: Run, slot: int) -> None:
        first, second = head.holds[slot], tail.holds[slot]
        first.num_blocks += second.num_blocks
        first.num_confirmed += second.num_confirmed
        first.used_at = max(first.used_at, second.used_at)
        second.unlink()
        head.keys.extend(tail.keys)
        head.forked = tail.forked
        self.where.update(dict.fromkeys(tail.keys, head))
        head.refresh_full()

    def trim(self, run: Run) -> None:
        """Forget the keys of a run that nobody holds any more. A pinned run keeps all of them."""
        keep = 0
        for hold in run.holds.values():
            keep = max(keep, len(run.keys) if hold.num_pins else hold.num_blocks)
        if keep < len(run.keys):
            for key in run.keys[keep:]:
                del self.where[key]
            del run.keys[keep:]
            run.forked = False
            run.refresh_full()

    def check_invariants(self) -> None:
        """Every key in one run, every hold within its run, every bit where it belongs."""
        runs = set(self.where.values())
        assert sum(len(run.keys) for run in runs) == len(self.where)
        for run in runs:
            assert all(self.where[key] is run for key in run.keys)
            full = 0
            for slot, hold in run.holds.items():
                assert hold.run is run
                assert hold.slot == slot
                assert 0 <= hold.num_confirmed <= hold.num_blocks <= len(run.keys)
                assert hold.num_blocks or hold.num_pins, "an empty hold stayed behind"
                assert hold.next is not None, "a hold in no list"
                full |= (hold.num_blocks == len(run.keys)) << slot
            assert run.full == full
            pinned = any(hold.num_pins for hold in run.holds.values())
            longest = max((hold.num_blocks for hold in run.holds.values()), default=0)
            assert pinned or longest == len(run.keys), "keys that nobody holds"


@lru_cache(maxsize=4096)
def slots_of(mask: int) -> tuple[int, ...]:
    """The bits of `mask`. Remembered: the same holders are met again and again."""
    return tuple(slot for slot in range(mask.bit_length()) if mask >> slot & 1)


def _mask_of(run: Run) -> int:
    mask = 0
    for slot in run.holds:
        mask |= 1 << slot
    return mask


def _holders_of(run: Run, num_blocks: int) -> int:
    """The slots that hold at least `num_blocks` of the run, as bits."""
    return sum(1 << slot for slot, hold in run.holds.items() if hold.num_blocks >= num_blocks)


def common_length(left: list[BlockKey], start: int, right: tuple[BlockKey, ...], position: int) -> int:
    """Length of the common stretch of left[start:] and right[position:], whose first keys are equal.

    Equal keys mean equal prefixes, so equality is monotone along the two and bisection finds the fork.
    """
    low, high = 1, min(len(left) - start, len(right) - position)
    if left[start + high - 1] == right[position + high - 1]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if left[start + middle - 1] == right[position + middle - 1]:
            low = middle
        else:
            high = middle
    return low


def _joinable(head: Run, tail: Run, slot: int) -> bool:
    if len(head.holds) != 1 or len(tail.holds) != 1:
        return False
    first, second = head.holds.get(slot), tail.holds.get(slot)
    if first is None or second is None or first.num_pins or second.num_pins:
        return False
    if first.num_blocks < len(head.keys):
        return False
    return first.num_confirmed == first.num_blocks or not second.num_confirmed
