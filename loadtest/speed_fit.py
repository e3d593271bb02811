"""A worker's speed as the simulator's service model, measured at its API.

    t_step = t0 + max(W, n lin) + att sum c (ctx + c / 2) + kv sum ctx_decode

Prompts of several lengths, nothing cached, each computed alone: their time to first token is
`way + t0 + n lin + att n^2 / 2` as long as a step takes all of it (and W is less than n lin, so short ones are left
out). Decodes alone, behind a short prompt and a long one: `t0 + W + kv ctx`. Medians of several tries each.

The way (HTTP, reading the request, from process to process and back) keeps a client waiting and no engine busy, so it
is no part of a step. A prompt of one token is computed as a decode is, in `t0 + W`: what its first token takes longer
than that is the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.sim.gpus import Gpu

MIN_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class Measured:
    """prefills: (tokens, seconds to the first token); decodes: (context tokens, seconds a token); ways: seconds to the
    first token of prompts of one token."""

    prefills: tuple[tuple[int, float], ...]
    decodes: tuple[tuple[int, float], ...]
    ways: tuple[float, ...] = ()


def medians(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """One pair for each first number, ascending."""
    groups: dict[int, list[float]] = {}
    for size, seconds in pairs:
        groups.setdefault(size, []).append(seconds)
    return sorted((size, median(values)) for size, values in groups.items())


def fit(name: str, measured: Measured, num_blocks: int) -> Gpu:
    """The constants that meet the medians best, none negative. Raises ValueError for less than three prompt lengths
    or less than two contexts."""
    prefills, decodes = medians(measured.prefills), medians(measured.decodes)
    if len(prefills) < 3 or len(decodes) < 2:
        raise ValueError("three prompt lengths and two contexts are needed at least")
    way_s = min(fit_way(measured), prefills[0][1])
    steps = [seconds - way_s for _, seconds in prefills]
    base, linear, attention = least_squares([(1.0, float(n), n * n / 2) for n, _ in prefills], steps)
    per_token, kv = _decode(decodes)
    step_s = min(max(base, MIN_STEP_S), 0.9 * max(per_token, 2 * MIN_STEP_S))
    return Gpu(name, max(per_token - step_s, 0.0), linear, kv, num_blocks, attention, step_s)


def fit_way(measured: Measured) -> float:
    """Seconds of a request's time to first token in which no engine is busy with it; 0 where no way was measured."""
    if not measured.ways:
        return 0.0
    per_token, kv = _decode(medians(measured.decodes))
    return max(median(measured.ways) - per_token - kv, 0.0)


def _decode(decodes: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds of a step of one sequence, and for each token of its context."""
    return least_squares([(1.0, float(context)) for context, _ in decodes], [seconds for _, seconds in decodes])


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Non-negative coefficients of least relative error, by coordinate descent on the normal equations."""
    weights = [1.0 / max(value, 1e-9) for value in values]
    scaled = [[x * w for x in row] for row, w in zip(rows, weights, strict=True)]
    size = len(rows[0])
    units = [max(abs(row[i]) for row in scaled) or 1.0 for i in range(size)]
    scaled = [[x / units[i] for i, x in enumerate(row)] for row in scaled]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    moment = [sum(row[i] for row in scaled) for i in range(size)]  # every value is 1 once divided by itself
    found = [0.0] * size
    for _ in range(20_000):
        largest = 0.0
        for i in range(size):
            rest = moment[i] - sum(gram[i][j] * found[j] for j in range(size) if j != i)
            new = max(rest / gram[i][i], 0.0)
            largest, found[i] = max(largest, abs(new - found[i])), new
        if largest < 1e-12:
            break
    return [value / units[i] for i, value in enumerate(found)]
