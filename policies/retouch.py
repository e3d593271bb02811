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
from math import inf, log2, pow
from typing import Final

from policies.types import BlockKey, PrefixChain, Rates

UNIT_TOKENS: Final = 512
FIRST_GAP_S: Final = 0.25
BINS_PER_OCTAVE: Final = 3
NUM_BINS: Final = 57  # the last is for gaps from a day and a half on
HALF_LIFE_S: Final = 1200.0
DECAY_EVERY_S: Final = 30.0
SUMS_EVERY: Final = 16  # prompts between two looks at the counts
SLOT_S: Final = 2.0  # touches not answered yet are counted by when they came, in slots so long
MAX_SLOTS: Final = 1800


class _Beyond:
    """Tokens and pairs re-touched after more than a bin's gap, and the tokens that were kept for so long or longer."""

    __slots__ = ("kept", "pairs", "tokens")

    def __init__(self, tokens: float, pairs: float, kept: float) -> None:
        self.tokens: Final = tokens
        self.pairs: Final = pairs
        self.kept: Final = kept


class _Counted:
    """The counts as they were at time `now`; `unanswered`: tokens touched and not since."""

    __slots__ = ("now", "open", "pairs", "tokens", "unanswered")

    def __init__(
        self, now: float, unanswered: float, tokens: list[float], pairs: list[float], open_slots: dict[int, int]
    ) -> None:
        self.now: Final = now
        self.unanswered: Final = unanswered
        self.tokens: Final = tokens
        self.pairs: Final = pairs
        self.open: Final = open_slots

    def beyond(self, gap_bin: int) -> _Beyond:
        tokens = pairs = recent = 0.0
        for longer in range(NUM_BINS - 1, gap_bin, -1):
            tokens += self.tokens[longer]
            pairs += self.pairs[longer]
        end_s = _end_of(gap_bin)
        for slot in reversed(self.open):  # touched no longer ago than the bin reaches: not answered yet
            age_s = max(self.now - (slot + 0.5) * SLOT_S, 0.0)
            if age_s > end_s:
                break
            recent += self.open[slot] * pow(0.5, age_s / HALF_LIFE_S)
        # what came back too late has had its time; decay may have left a little less of it than of the others
        return _Beyond(tokens, pairs, max(self.unanswered + tokens - recent, tokens))


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
        self._counted: _Counted | None = None
        self._beyond: dict[int, _Beyond] = {}  # of what is counted, by bin, as far as asked for

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
            self._count(now)
        self._num_prompts += 1

    def lost_s(self, idle_s: float, rates: Rates) -> float:
        """S(idle_s): expected seconds lost for each token evicted after lying idle for `idle_s`."""
        counted = self._counted
        if counted is None:
            return 0.0
        gap_bin = _bin_of(idle_s)
        beyond = self._beyond.get(gap_bin)
        if beyond is None:
            beyond = self._beyond[gap_bin] = counted.beyond(gap_bin)
        if not beyond.tokens:
            return 0.0
        return (rates.linear_s * beyond.tokens + rates.quadratic_s * beyond.pairs) / beyond.kept

    def _count(self, now: float) -> None:
        """What is asked from now on is answered by the counts as they are."""
        unanswered = self._touched - sum(self._tokens)
        self._counted = _Counted(now, unanswered, self._tokens[:], self._pairs[:], self._open.copy())
        self._beyond.clear()

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
