"""Counts that cost next to nothing to keep, and become metrics only when somebody asks.

prometheus_client's own objects take a lock and several calls for each observation, of which a stream makes one a token.
The gateway counts on one thread, so plain numbers do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Buckets:
    """A histogram's state. `bounds` are inclusive upper bounds, ascending; a last one of infinity is implied."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, observations up to it), as Prometheus has it."""
        result, seen = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts, strict=True):
            seen += count
            result.append((bound, float(seen)))
        return result

    def check_invariants(self) -> None:
        assert list(self._bounds) == sorted(self._bounds)
        assert len(self.counts) == len(self._bounds) + 1
        assert min(self.counts) >= 0
