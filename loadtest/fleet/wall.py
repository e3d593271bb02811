"""The simulator's clock, kept by the wall's: the same events in the same order, each when its moment has come.

While an event runs, `now` is the moment it was due, not the later one at which the process got to it. So a busy machine
delays what is said, never the engine's own account of time, and delays don't add up. How late events were is recorded:
a run whose lag is small against the times it measures can be trusted.
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from loadtest.sim.clock import Clock
from loadtest.sim.figures import percentile


class WallClock(Clock):
    """`now` in seconds of the trace since the start, which pass `speedup` times as fast as the loop's.

    Call `sync` before touching what lives by this clock from outside of an event. `close` ends it. `on_ran` is called
    after events have run.
    """

    def __init__(self, speedup: float) -> None:
        super().__init__()
        if not speedup > 0:
            raise ValueError(f"a speed-up of {speedup}: give a number above 0")
        self.speedup = speedup
        self.lags_s = array("d")
        self.on_ran: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")  # of the timer
        self._running = False

    def read(self) -> float:
        """The moment it is now."""
        return (self._loop.time() - self._origin) * self.speedup

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        super().at(when, action, *args)
        if not self._running and self._heap[0][0] < self._due:
            self._arm()

    def sync(self) -> float:
        """Let everything happen that is due; `now` is then the present, and is returned."""
        assert not self._running, "an event is no outside"
        # Not a later reading than the one that nothing was due at: an event may have come due since.
        self.now = max(self.now, self._run_due())
        return self.now

    def run(self, until: Callable[[], bool] | None = None) -> None:
        raise TypeError("the wall's clock runs by itself")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()
        self._due = float("inf")

    def _run_due(self) -> float:
        """Returns a moment up to which everything has happened."""
        heap = self._heap
        present = self.read()
        self._running = True
        try:
            while heap and heap[0][0] <= present:
                self.now, _, action, args = heapq.heappop(heap)
                self.num_events += 1
                self.lags_s.append(present - self.now)
                action(*args)
                present = self.read()
        finally:
            self._running = False
            self._arm()
        if self.on_ran is not None:
            self.on_ran()
        return present

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = float("inf")
        if self._heap:
            self._due = self._heap[0][0]
            self._timer = self._loop.call_at(self._origin + self._due / self.speedup, self._run_due)


def lag_row(lags_s: Sequence[float], prefix: str) -> dict[str, float]:
    """How late events were, in seconds of the trace."""
    ordered = sorted(lags_s) or [0.0]
    return {f"{prefix}_p{percent}_s": percentile(ordered, percent) for percent in (50, 99, 100)}
