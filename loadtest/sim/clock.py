"""Simulated time: a heap of things to do, run in order of time; of equal times, the one asked for first goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """`now` only moves in `run`, from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` at `when` (now, if that is past)."""
        self._number += 1
        heapq.heappush(self._heap, (max(when, self.now), self._number, action, args))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Until nothing is left to do, or `until` says so after an event."""
        heap = self._heap
        while heap:
            self.now, _, action, args = heapq.heappop(heap)
            self.num_events += 1
            action(*args)
            if until is not None and until():
                return
