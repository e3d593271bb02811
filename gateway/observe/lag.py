"""A watch on the event loop: whatever blocks it holds up every request at once.

A timer measures how late it comes, for a histogram. A thread beside the loop notices when the timer doesn't come at all
and logs where the loop stands (functions and lines, no values), while it still stands there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback

from gateway.observe.histogram import Buckets

_log = logging.getLogger("warmgate.loop")
_EVERY_S = 0.25


class LoopWatch:
    """Watches the running loop from `start` to `close`. `blocked_s` is how long it may stand still unnoticed."""

    def __init__(self, lag: Buckets, blocked_s: float = 5.0) -> None:
        self._lag = lag
        self._blocked_s = blocked_s
        self._timer: asyncio.TimerHandle | None = None
        self._beat_at = 0.0
        self._loop_thread = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_blocked = 0

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._beat_at = time.monotonic()
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        self._lag.observe(max(now - self._beat_at - _EVERY_S, 0.0))
        self._beat_at = now
        self._arm()

    def _watch(self) -> None:
        reported_at = 0.0
        while not self._closing.wait(self._blocked_s / 4):
            beat_at = self._beat_at
            if beat_at != reported_at and time.monotonic() - beat_at > self._blocked_s:
                reported_at = beat_at
                self.num_blocked += 1
                frame = sys._current_frames().get(self._loop_thread)
                where = "".join(traceback.format_stack(frame, limit=20)) if frame is not None else "unknown"
                _log.error("the event loop has stood still for %.1f s at:\n%s", time.monotonic() - beat_at, where)
