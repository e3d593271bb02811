"""When Python's cyclic garbage collector may stop the gateway.

A full collection walks every object there is, the router's index above all, and stands in the way of every request for
as long: a tenth of a second on a small index, seconds on a large one. Requests leave hardly any cycles, and those die
young. So the collector's young generations go on as ever (seldom), and full collections happen when nothing is under
way, or after `MAX_WAIT_S` at the latest.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

EVERY_S = 60.0
MAX_WAIT_S = 1800.0
_NEVER = 1_000_000


def tame() -> None:
    """Leave what start-up made out of collections, and collect young objects seldom, old ones not by count."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, _NEVER)


class FullCollections:
    """Runs `collect` at good moments, from `start` to `close`; `is_idle` says whether nothing is under way."""

    def __init__(
        self, is_idle: Callable[[], bool], collect: Callable[[], object] = gc.collect, every_s: float = EVERY_S
    ) -> None:
        self._is_idle = is_idle
        self._collect = collect
        self._every_s = every_s
        self._waited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._waited_s += self._every_s
        if self._is_idle() or self._waited_s >= MAX_WAIT_S:
            self._waited_s = 0.0
            self._collect()
        self.start()
