"""When a stream's next read may wait a moment, so that what comes meanwhile goes on in one piece.

A piece of a stream costs a read, its way through the parser, and a write: about a tenth of a millisecond, whether it
holds one token or twenty. Many fast streams at once fill a core with pieces of one token each. Then, and only then, a
stream's replica is not read for a moment after each piece. What comes meanwhile waits in the kernel, as it does when
the gateway is late anyway, and is one piece in the end. Nothing is held in the gateway, so nothing else changes: not
the order, not what is known to be sent, not what happens to whoever breaks off.

A pause is a stream's share of a budget: `n` streams are read _READS_PER_S times a second together, so each pauses for
n / _READS_PER_S seconds, `join_s` at most. Only those under way count that something came of in the last moment: a
thousand that wait for a slow client or a slow replica cost no reads, and nobody need wait on their account. A stream
whose pieces are further apart anyway does not pause, and none does while the loop's thread has slept for most of the
last moment: its CPU clock is read a few times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, Protocol

_READS_PER_S: Final = 4000.0  # by all streams together: 0.1 ms each, so less than half a core
_LEAST_S: Final = 0.002  # the loop's timers know milliseconds
_BUSY_SHARE: Final = 0.5  # of a core, from which on streams pause, until it is half of that: pausing makes it smaller
_LOOK_S: Final = 0.05
_SLACK_S: Final = 0.002  # whoever's time comes so soon need not have a timer of its own


class Paused(Protocol):
    """A stream that is not read for a moment."""

    def read_on(self) -> None:
        """The moment is over."""
        ...


class Joiner:
    """The pauses of all streams on one loop, none longer than `join_s` (0: there are none). The other arguments are
    for tests.

    num_streams  under way
    num_pauses   so far
    """

    __slots__ = (
        "_busy_share",
        "_cpu_s",
        "_is_busy",
        "_join_s",
        "_look_at",
        "_looked_at",
        "_num_read",
        "_pause_s",
        "_paused",
        "_reads_per_s",
        "_timer",
        "num_pauses",
        "num_streams",
    )

    def __init__(self, join_s: float, busy_share: float = _BUSY_SHARE, reads_per_s: float = _READS_PER_S) -> None:
        self._join_s = join_s
        self._reads_per_s = reads_per_s
        self._busy_share = busy_share
        self._is_busy = False
        self._num_read = 0  # streams under way that began or were read since the last look
        self._pause_s = 0.0
        self._looked_at = self._look_at = time.monotonic()
        self._cpu_s = time.thread_time()
        self._paused: deque[tuple[float, Paused]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.num_streams = 0
        self.num_pauses = 0

    def begins(self) -> None:
        """Another stream is under way, from now on."""
        self.num_streams += 1
        self._num_read += 1

    def ends(self, last: float) -> None:
        """One is no longer. It began, or was told of in `pause_s`, `last`."""
        self.num_streams -= 1
        if last > self._looked_at:
            self._num_read -= 1

    def pause_s(self, now: float, before: float) -> float:
        """How long a stream that was read `now`, and last `before`, should not be read again; 0: not at all."""
        if before <= self._looked_at:
            self._num_read += 1
        if now >= self._look_at:
            self._look(now)
        return self._pause_s

    def _look(self, now: float) -> None:
        cpu_s, elapsed_s = time.thread_time(), now - self._looked_at
        if elapsed_s > 0:
            share = (cpu_s - self._cpu_s) / elapsed_s
            self._is_busy = share >= (self._busy_share / 2 if self._is_busy else self._busy_share)
        pause_s = min(self._join_s, self._num_read / self._reads_per_s) if self._is_busy else 0.0
        self._pause_s = pause_s if pause_s >= _LEAST_S else 0.0
        self._cpu_s, self._looked_at, self._look_at = cpu_s, now, now + _LOOK_S
        self._num_read = 0

    def add(self, stream: Paused, until: float) -> None:
        """Call `stream.read_on()` at `until`, some `pause_s` from now (or once those before it have had their turn)."""
        self.num_pauses += 1
        self._paused.append((until, stream))
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._paused[0][0], self._turn)

    def _turn(self) -> None:
        self._timer = None
        until = time.monotonic() + _SLACK_S
        paused = self._paused
        while paused and paused[0][0] <= until:
            paused.popleft()[1].read_on()
        if paused:
            self._arm()

    def check_invariants(self) -> None:
        assert (self._timer is None) == (not self._paused)
        assert 0 <= self._num_read <= self.num_streams
        assert self._pause_s <= self._join_s
