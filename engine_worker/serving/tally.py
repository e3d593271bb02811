"""A histogram that is cheap to add to: what a token is observed with is paid for each of every stream's.

prometheus_client's own takes a lock for each of its numbers. All of a worker's observations are made in the event
loop's thread, so a count is a count. Cumulative buckets are made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Tally:
    """Counts of values up to each of `buckets` (ascending upper bounds, inclusive), and of those above, and the sum."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """As Prometheus knows it: each bucket counts those below it, too."""
        made = HistogramMetricFamily(self.name, self.text, labels=tuple(labels))
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        made.add_metric(tuple(labels.values()), buckets, self._sum)
        return made
