"""What an evicted block costs: how often blocks that lay idle for so long are asked for again.

Theory. A block that has been idle for `a` seconds is worth keeping for the recomputation that it may still save:

    S(a) = recompute seconds of re-touches after more than a  /  touches not re-touched within a

of the touches that lie further back than a: what was touched since has had no time to show whether it comes back
within a. (Counted with the rest, it would make every block look cheap until traffic has run for several times a.)

Both are counted over the whole fleet's traffic, wherever it went: every prompt touches its blocks, and a block touched
before is re-touched after the gap between. Gaps fall into bins of a third of an octave; counts decay with time, so the
figure follows the traffic. Recomputation is kept as tokens and attended pairs and turned into seconds at the rates of
the replica in question. One key in every UNIT_TOKENS stands for the tokens before it, so that long prompts of small
blocks cost no more to follow than those of large blocks; touches are remembered beyond eviction, up to `max_tracked`.

A replica that is full evicts blocks of an idle age of its own, A (mirror.py): a token that is cached there in addition
pushes out one worth S(A).
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf, log2

from policies.types import BlockKey, PrefixChain, Rates

UNIT_TOKENS = 512
FIRST_GAP_S = 0.25
BINS_PER_OCTAVE = 3
NUM_BINS = 57  # the last is for gaps from a day and a half on
HALF_LIFE_S = 1200.0
DECAY_EVERY_S = 30.0
SUMS_EVERY = 16  # prompts between two rebuilds of the sums
SLOT_S = 2.0  # touches not answered yet are counted by when they came, in slots so long
MAX_SLOTS = 1800


class Retouches:
    """Counts of touches and re-touches by gap. Deterministic; the times are the events'."""

    def __init__(self, max_tracked: int = 262_144) -> None:
        self._max_tracked = max_tracked
        self._last: OrderedDict[BlockKey, float] = OrderedDict()
        self._open: dict[int, int] = {}  # tokens whose last touch fell into the slot, the oldest slot first
        self._touched = 0.0  # tokens
        self._tokens = [0.0] * NUM_BINS  # re-touched, by gap
        self._pairs = [0.0] * NUM_BINS
        self._decayed_at: float | None = None
        self._num_prompts = 0
        self._beyond: list[tuple[float, float, float]] = []  # per bin: tokens, pairs re-touched beyond it; tokens kept

    def touched(self, chain: PrefixChain, now: float) -> None:
        """A prompt was sent somewhere."""
        self._decay(now)
        stride = max(UNIT_TOKENS // max(chain.block_tokens, 1), 1)
        unit, keys, slots = stride * chain.block_tokens, chain.keys, self._open
        for place in range(stride - 1, len(keys), stride):
            key = keys[place]
            last = self._last.get(key)
            if last is not None:
                gap_bin = _bin_of(now - last)
                self._tokens[gap_bin] += unit
                self._pairs[gap_bin] += unit * ((place + 1) * chain.block_tokens - unit / 2)
                if (slot := int(last / SLOT_S)) in slots:
                    slots[slot] -= unit
            self._last[key] = now
            self._last.move_to_end(key)
        num_touched = unit * (len(keys) // stride)
        self._touched += num_touched
        slots[int(now / SLOT_S)] = slots.get(int(now / SLOT_S), 0) + num_touched
        if len(slots) > MAX_SLOTS:
            del slots[next(iter(slots))]
        while len(self._last) > self._max_tracked:
            self._last.popitem(last=False)
        if self._num_prompts % SUMS_EVERY == 0:
            self._sum(now)
        self._num_prompts += 1

    def lost_s(self, idle_s: float, rates: Rates) -> float:
        """S(idle_s): expected seconds lost for each token evicted after lying idle for `idle_s`."""
        if not self._beyond:
            return 0.0
        tokens, pairs, kept = self._beyond[_bin_of(idle_s)]
        return (rates.linear_s * tokens + rates.quadratic_s * pairs) / kept if tokens else 0.0

    def _sum(self, now: float) -> None:
        tokens = pairs = 0.0
        unanswered = self._touched - sum(self._tokens)
        beyond = []
        for gap_bin, recent in zip(reversed(range(NUM_BINS)), self._recent(now), strict=True):
            # what came back too late has had its time; decay may have left a little less of it than of the others
            beyond.append((tokens, pairs, max(unanswered + tokens - recent, tokens)))
            tokens += self._tokens[gap_bin]
            pairs += self._pairs[gap_bin]
        self._beyond = beyond[::-1]

    def _recent(self, now: float) -> list[float]:
        """For every bin, the last one first: tokens touched no longer ago than it reaches and not since."""
        gap_bin, total, recent = 0, 0.0, []
        for slot in reversed(self._open):
            age_s = max(now - (slot + 0.5) * SLOT_S, 0.0)
            while gap_bin < NUM_BINS and age_s > _end_of(gap_bin):
                recent.append(total)
                gap_bin += 1
            total += self._open[slot] * 0.5 ** (age_s / HALF_LIFE_S)
        recent += [total] * (NUM_BINS - gap_bin)
        return recent[::-1]

    def _decay(self, now: float) -> None:
        if self._decayed_at is None:
            self._decayed_at = now
        elapsed = now - self._decayed_at
        if elapsed < DECAY_EVERY_S:
            return
        factor = 0.5 ** (elapsed / HALF_LIFE_S)
        self._decayed_at = now
        self._touched *= factor
        self._tokens = [value * factor for value in self._tokens]
        self._pairs = [value * factor for value in self._pairs]

    def check_invariants(self) -> None:
        assert len(self._last) <= self._max_tracked
        assert min(self._tokens) >= 0.0
        assert len(self._open) <= MAX_SLOTS
        assert min(self._open.values(), default=0) >= 0
        assert list(self._open) == sorted(self._open), "slots are not in the order of time"
        assert min(self._pairs) >= 0.0
        assert sum(self._tokens) <= self._touched * (1.0 + 1e-9)
        times = list(self._last.values())
        assert times == sorted(times), "touches are not in the order of time"


def _bin_of(gap_s: float) -> int:
    if gap_s <= FIRST_GAP_S:
        return 0
    return min(int(BINS_PER_OCTAVE * log2(gap_s / FIRST_GAP_S)) + 1, NUM_BINS - 1)


def _end_of(gap_bin: int) -> float:
    """The longest gap that falls into the bin."""
    return FIRST_GAP_S * 2.0 ** (gap_bin / BINS_PER_OCTAVE) if gap_bin < NUM_BINS - 1 else inf
