"""How many tokens to speculate for whom: measured costs against measured luck. No clock: whoever steps tells the times.

Decoding few requests reads all weights for few tokens, so some tokens more cost little; with many requests arithmetic
is the limit, and each wrong guess takes the time of a right token. Where that turns depends on machine, model and
kernels, so it is measured: seconds of a step by its number of tokens (`StepCosts`), and for each request the chance
that a guess is right, given that those before it were (`Luck`).

With chance a, k guesses bring a + a^2 + ... + a^k tokens on average. The guess at depth j is worth a^j tokens, less
than the one before it; so for any number of guesses in all, the best ones are those worth more than some threshold.
A few thresholds are tried, each a choice of depths for all requests, and the one with most tokens a second wins.

A size of step that was never seen is taken to cost what the next smaller one does, so it is tried and becomes known.
What a step without guesses costs must be known first, so such steps run, too. Luck that is not tried fades to where it
began. Speculation goes off when the best choice is no faster than none, and on again when it promises a tenth more;
while it is off, one step in PROBE_STEPS tries it, and while it is on, one runs without: prices get out of date.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ON_GAIN = 1.1
PROBE_STEPS = 100
_THRESHOLDS = (0.85, 0.7, 0.5, 0.35, 0.2, 0.1)
_REMEMBERED = 5  # steps of a size whose median is its price
_PRIOR = (1.2, 0.8)  # right and wrong guesses that a request begins with
_FADE_TRIED = 0.9  # what is left of earlier evidence after a step that tried
_FADE_IDLE = 0.97  # and after one that could have tried and did not


class StepCosts:
    """Seconds of a step by its number of tokens, from steps that ran."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._points: dict[int, tuple[float, float]] = {}
        self._curve: list[tuple[float, float]] = []  # (tokens, seconds), both rising

    def record(self, num_tokens: int, seconds: float) -> None:
        size = _size_class(num_tokens)
        seen = self._seen.setdefault(size, deque(maxlen=_REMEMBERED))
        seen.append((num_tokens, seconds))
        self._points[size] = (sum(n for n, _ in seen) / len(seen), median(s for _, s in seen))
        self._curve = []
        most = 0.0
        for tokens, cost in sorted(self._points.values()):
            most = max(most, cost)
            self._curve.append((tokens, most))

    def knows(self, num_tokens: int) -> bool:
        """Whether a step of about this size has run."""
        return _size_class(num_tokens) in self._seen

    def seconds(self, num_tokens: int) -> float:
        """What a step of so many tokens takes, 0 while nothing is known. Between known sizes a straight line."""
        curve = self._curve
        if not curve:
            return 0.0
        at = bisect_left(curve, (num_tokens, 0.0))
        if at == 0 or at == len(curve):
            return curve[min(at, len(curve) - 1)][1]
        (low, less), (high, more) = curve[at - 1], curve[at]
        return less + (more - less) * (num_tokens - low) / (high - low)


@dataclass(slots=True)
class Luck:
    """Evidence of one request's guesses: right ones, and first wrong ones."""

    right: float = _PRIOR[0]
    wrong: float = _PRIOR[1]

    @property
    def chance(self) -> float:
        return min(self.right / (self.right + self.wrong), 0.98)

    def tried(self, num_drafts: int, num_accepted: int) -> None:
        """A draft is verified up to the first wrong guess; those behind it tell nothing."""
        self._fade(_FADE_TRIED)
        self.right += num_accepted
        self.wrong += num_accepted < num_drafts

    def idle(self) -> None:
        self._fade(_FADE_IDLE)

    def _fade(self, share: float) -> None:
        self.right = _PRIOR[0] + share * (self.right - _PRIOR[0])
        self.wrong = _PRIOR[1] + share * (self.wrong - _PRIOR[1])


class SpeculationControl:
    """Decides depths. `is_on` tells whether speculation pays at present (with hysteresis).

    With `always` it decides nothing: all possible guesses are tried, whatever they cost (to measure and to test).
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self.costs = StepCosts()
        self.is_on = True
        self._luck: dict[str, Luck] = {}
        self._num_steps = 0  # since it went on or off

    def depths(
        self, rooms: Sequence[tuple[str, int]], num_decodes: int, num_other_tokens: int = 0, depth_s: float = 0.0
    ) -> list[int]:
        """How many of its possible guesses each request should try. rooms: (request id, guesses possible).

        The step will decode `num_decodes` requests in all and compute `num_other_tokens` besides. Each level of depth
        costs `depth_s` before the step (a draft model's forward).
        """
        if not rooms or self._always:
            return [room for _, room in rooms]
        lucks = [self._luck.setdefault(request_id, Luck()) for request_id, _ in rooms]
        base = num_decodes + num_other_tokens
        self._num_steps += 1
        if not self.costs.knows(base) or (self.is_on and self._num_steps % PROBE_STEPS == 0):
            return [0] * len(rooms)
        plain = num_decodes / max(self.costs.seconds(base), 1e-9)
        best_rate, best = 0.0, [0] * len(rooms)
        for threshold in _THRESHOLDS:
            depths = [min(room, _depth(luck.chance, threshold)) for luck, (_, room) in zip(lucks, rooms, strict=True)]
            if any(depths):
                gain = sum(_gain(luck.chance, depth) for luck, depth in zip(lucks, depths, strict=True))
                seconds = self.costs.seconds(base + sum(depths)) + depth_s * max(depths)
                rate = (num_decodes + gain) / max(seconds, 1e-9)
                if rate > best_rate:
                    best_rate, best = rate, depths
        return self._decided(best, best_rate / plain, lucks)

    def _decided(self, best: list[int], gain: float, lucks: list[Luck]) -> list[int]:
        if any(best):
            was_on, self.is_on = self.is_on, gain > (1.0 if self.is_on else ON_GAIN)
            if was_on != self.is_on:
                self._num_steps = 1
        if not self.is_on and self._num_steps % PROBE_STEPS:
            best = [0] * len(best)
        for luck, depth in zip(lucks, best, strict=True):
            if depth == 0:
                luck.idle()
        return best

    def tried(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """The outcome of one request's guesses in a step."""
        self._luck.setdefault(request_id, Luck()).tried(num_drafts, num_accepted)

    def release(self, request_id: str) -> None:
        self._luck.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        return len(self._luck)


def _depth(chance: float, threshold: float) -> int:
    """The deepest guess worth at least `threshold` tokens."""
    return int(math.log(threshold) / math.log(chance) + 1e-9)


def _gain(chance: float, depth: int) -> float:
    return chance * (1 - chance**depth) / (1 - chance)


def _size_class(num_tokens: int) -> int:
    """1, 2, 3, 4 each for itself, then two classes an octave."""
    if num_tokens <= 4:
        return num_tokens
    exponent = num_tokens.bit_length() - 1
    return 2 * exponent + (num_tokens >> (exponent - 1) & 1)
