"""Seconds: a replica's speed, learned online from what it does.

Theory. Prefill of a group of requests that came out together takes about

    base * requests + linear * uncached tokens + quadratic * attended pairs

and one decode step about `step + kv * KV tokens of the batch`. Both are fits of a few non-negative coefficients over a
decaying window. Errors count relative to the prediction (a 50 ms prompt teaches as much as a 5 s one), and large ones
are clipped (Huber), so that one stall or one compile teaches little; several in a row are believed. The prior gives the
coefficients' proportions only: its scale starts as the median ratio of the first observations and follows the fit, so
a laptop and an H200 both start sane. Its pull keeps coefficients that the traffic never separated (prompts all of one
length) where they make sense.

A replica that has seen little borrows from its fleet: nothing yet, the fleet's median; a little, a mean of both on a
logarithmic scale. So a newcomer is neither shunned nor stormed, and an unlucky first request doesn't brand a replica.
One that turns out about as fast as its peers keeps the fleet's rates: noise in the fits must not make one of several
equal replicas the favourite of every cold request (an error of that size costs a decision next to nothing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from statistics import median
from typing import Final

from policies.types import Rates

PREFILL_PRIOR = (0.01, 1e-4, 2e-9)  # s a request, s a token, s an attended pair; proportions matter, scale does not
DECODE_PRIOR = (0.02, 1e-7)  # s a step, s a KV token
DEFAULT_RATES = Rates(*PREFILL_PRIOR, decode_step_s=DECODE_PRIOR[0], decode_kv_s=DECODE_PRIOR[1])

NUM_SCALING: Final = 5  # observations that set the prior's scale
PRIOR_WEIGHT: Final = 0.05  # in observations: a prior wrong by a half, where observations err by a tenth
DECAY: Final = 0.97  # a window of about 33 observations
HUBER: Final = 0.5  # relative error from which on an observation counts less
SHIFT: Final = 4  # as many outliers in a row are no outliers: the replica has become slower
DRIFT: Final = 1.2
SWEEPS: Final = 12
SETTLED: Final = 1e-4  # a sweep that moves no coefficient by more of its prior is the last
TYPICAL_WEIGHT: Final = 0.1
ALIKE: Final = 1.33  # replicas this close in speed are taken for equal
MIN_OUTPUT_TOKENS: Final = 8  # fewer say little about the decode step


class RobustFit:
    """y ~ sum(coefficient * feature), coefficients >= 0, by decayed, relative, Huber-weighted least squares.

    Solved by coordinate descent on the normal equations in units of the scaled prior (so all near 1), warm-started.
    """

    __slots__ = ("_early", "_gram", "_moment", "_prior", "_scale", "_streak", "_units", "num_observations")

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        self._early: list[tuple[tuple[float, ...], float]] = []
        self.num_observations = 0
        self._reset(1.0)

    def _reset(self, scale: float) -> None:
        size = len(self._prior)
        self._scale = scale
        self._streak = 0  # observations in a row that were much too slow
        self._units = [1.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(self._scale * p * u for p, u in zip(self._prior, self._units, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        return sum((c * x for c, x in zip(self.coefficients, features, strict=True)), 0.0)

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        """Learn that `features` took `seconds`. Anything but a positive finite time is ignored."""
        if not (0.0 < seconds < math.inf):
            return
        self.num_observations += 1
        if self.num_observations <= NUM_SCALING:
            self._early.append((features, seconds))
            priors = [sum((p * x for p, x in zip(self._prior, f, strict=True)), 0.0) for f, _ in self._early]
            self._reset(median(y / max(p, 1e-12) for (_, y), p in zip(self._early, priors, strict=True)))
            for early_features, early_seconds in self._early:
                self._accumulate(early_features, early_seconds)
        else:
            self._early = []
            self._accumulate(features, seconds)

    def _accumulate(self, features: tuple[float, ...], seconds: float) -> None:
        expected = max(self.predict(features), 1e-9)
        error = seconds / expected - 1.0
        self._streak = self._streak + 1 if error > HUBER else 0
        weight = 1.0 if error <= HUBER or self._streak >= SHIFT else HUBER / error
        row = [self._scale * p * x / expected for p, x in zip(self._prior, features, strict=True)]
        target = seconds / expected
        for i, value in enumerate(row):
            self._moment[i] = DECAY * self._moment[i] + weight * value * target
            line = self._gram[i]
            for j, other in enumerate(row):
                line[j] = DECAY * line[j] + weight * value * other
        self._solve()
        fitted = sum((value * unit for value, unit in zip(row, self._units, strict=True)), 0.0)
        self._follow(fitted / sum(row))

    def _follow(self, drift: float) -> None:
        """Let the prior's scale follow a fit that has moved by `drift`, so that its pull is on proportions alone."""
        if 1 / DRIFT <= drift <= DRIFT or drift <= 0.0:
            return
        self._scale *= drift
        self._units = [unit / drift for unit in self._units]
        self._moment = [value * drift for value in self._moment]
        self._gram = [[value * drift * drift for value in line] for line in self._gram]

    def _solve(self) -> None:
        units, gram, moment = self._units, self._gram, self._moment
        for _ in range(SWEEPS):
            moved = 0.0
            for i, was in enumerate(units):
                diagonal = gram[i][i]
                rest = moment[i] + PRIOR_WEIGHT - sum(map(mul, gram[i], units))
                now = max((rest + diagonal * was) / (diagonal + PRIOR_WEIGHT), 0.0)
                units[i] = now
                moved = max(moved, abs(now - was))
            if moved < SETTLED:
                return


class SpeedModel:
    """One replica's rates as they are learned."""

    __slots__ = ("_decode", "_own", "_prefill", "_typical_uncached")

    def __init__(self) -> None:
        self._prefill = RobustFit(PREFILL_PRIOR)
        self._decode = RobustFit(DECODE_PRIOR)
        self._own: Rates | None = None  # own_rates() until the next observation
        self._typical_uncached = 1000.0  # tokens, of a request; where this replica's speed is compared

    @property
    def num_observations(self) -> int:
        return self._prefill.num_observations

    def observe_prefill(self, num_requests: int, num_uncached: int, num_attended: float, seconds: float) -> None:
        """A group of requests was prefilled in `seconds`; `num_attended` sums n * (c + n / 2) over them."""
        self._own = None
        self._typical_uncached += TYPICAL_WEIGHT * (num_uncached / num_requests - self._typical_uncached)
        self._prefill.observe((float(num_requests), float(num_uncached), num_attended), seconds)

    def observe_decode(self, num_output_tokens: int, seconds: float, kv_tokens: float) -> None:
        """A request's tokens after its first took `seconds`, beside `kv_tokens` in the running batch."""
        if num_output_tokens >= MIN_OUTPUT_TOKENS:
            self._own = None
            self._decode.observe((1.0, kv_tokens), seconds / (num_output_tokens - 1))

    def own_rates(self) -> Rates:
        if self._own is None:
            base, linear, quadratic = self._prefill.coefficients
            step, kv = self._decode.coefficients
            self._own = Rates(base, linear, quadratic, step, self._prefill.num_observations, kv)
        return self._own

    def rates(self, fleet: Rates | None) -> Rates:
        """What to expect of the replica; `fleet` is what its peers take (None when no peer has been seen)."""
        own = self.own_rates()
        if fleet is None:
            return own
        typical = max(int(self._typical_uncached), 1)
        share = _share_of_own(own.num_observations, own.prefill_s(typical, 0), fleet.prefill_s(typical, 0))
        decode = _share_of_own(self._decode.num_observations, own.decode_step_s, fleet.decode_step_s)
        return Rates(
            _blend(own.base_s, fleet.base_s, share),
            _blend(own.linear_s, fleet.linear_s, share),
            _blend(own.quadratic_s, fleet.quadratic_s, share),
            _blend(own.decode_step_s, fleet.decode_step_s, decode),
            own.num_observations,
            _blend(own.decode_kv_s, fleet.decode_kv_s, decode),
        )


def fleet_rates(models: Sequence[SpeedModel]) -> Rates | None:
    """The median of what the observed replicas take; None when none was observed."""
    observed = [model.own_rates() for model in models if model.num_observations]
    if not observed:
        return None
    return Rates(
        median(r.base_s for r in observed),
        median(r.linear_s for r in observed),
        median(r.quadratic_s for r in observed),
        median(r.decode_step_s for r in observed),
        0,
        median(r.decode_kv_s for r in observed),
    )


def _share_of_own(num_observations: int, own_s: float, fleet_s: float) -> float:
    """How much a replica's own rates count beside the fleet's, 0 to 1."""
    if num_observations >= NUM_SCALING and 1 / ALIKE < own_s / max(fleet_s, 1e-12) < ALIKE:
        return 0.0
    return min(num_observations / NUM_SCALING, 1.0)


def _blend(own: float, fleet: float, share: float) -> float:
    if share in (0.0, 1.0) or own <= 0.0 or fleet <= 0.0:
        return own if share > 0.5 else fleet
    return float(own**share * fleet ** (1.0 - share))
