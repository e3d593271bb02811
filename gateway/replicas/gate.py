"""How much of the traffic one replica may have: a circuit breaker, and a slow start after it was away. Pure.

Breaker. `OPEN_AFTER` failures in a row that are the replica's fault open it: no request goes there for a while, which
doubles each time it opens again. Then one request goes as a trial. Its success closes the breaker, its failure opens
it again. A client's cancel says nothing.

Slow start. A replica that comes (back) has an empty cache and untried health, and rules that look for idle replicas
would send it everything at once. So for `slow_start_s` it may hold only a share of what the others hold on average,
which grows with time.

Leaving. A replica that is to go keeps a share of the traffic that shrinks to nothing over a given time. Which requests
it keeps is for the caller to say by their place (0 to 1, the same for one session): the smallest places go first.

All yield where nobody else is left (router.py): a gate spreads traffic, it never refuses a request.
"""

from __future__ import annotations

from typing import Final

OPEN_AFTER: Final = 5
OPEN_S: Final = 5.0
MAX_OPEN_S: Final = 60.0


class Gate:
    """Times are of the monotonic clock. `slow_start_s` of 0 turns slow start off."""

    __slots__ = (
        "_leave_s", "_leaving_since", "_num_failures", "_num_openings", "_open_until", "_ramp_since", "_slow_start_s",
        "_trial",
    )  # fmt: skip

    def __init__(self, slow_start_s: float) -> None:
        self._slow_start_s = slow_start_s
        self._num_failures = 0
        self._num_openings = 0
        self._open_until: float | None = None
        self._trial = False
        self._ramp_since: float | None = None
        self._leaving_since: float | None = None
        self._leave_s = 0.0

    @property
    def is_leaving(self) -> bool:
        return self._leaving_since is not None

    def leave(self, now: float, over_s: float) -> None:
        """Keep ever less of the traffic, and none after `over_s`."""
        self._leaving_since, self._leave_s = now, over_s

    def stay(self) -> None:
        self._leaving_since = None

    @property
    def is_open(self) -> bool:
        """No traffic, or only a trial."""
        return self._open_until is not None

    def is_plain(self, now: float) -> bool:
        """Whether it admits everything, and will until something happens."""
        if self._ramp_since is not None and now - self._ramp_since >= self._slow_start_s:
            self._ramp_since = None
        return self._open_until is None and self._ramp_since is None and self._leaving_since is None

    def admits(self, now: float, num_in_flight: int, mean_in_flight: float, place: float = 1.0) -> bool:
        """Whether one more request may go there, beside `num_in_flight`; the replicas hold `mean_in_flight` each.

        `place` is the request's among those that a leaving replica keeps for longer or shorter."""
        if self._leaving_since is not None and now - self._leaving_since >= place * self._leave_s:
            return False
        if self._open_until is not None:
            return now >= self._open_until and not self._trial
        if self._ramp_since is None or self._slow_start_s <= 0:
            return True
        share = (now - self._ramp_since) / self._slow_start_s
        return share >= 1.0 or num_in_flight < 1.0 + share * mean_in_flight

    def dispatched(self) -> None:
        """A request went there; while the breaker is open, it is the trial."""
        if self._open_until is not None:
            self._trial = True

    def succeeded(self, now: float) -> bool:
        """Whether the breaker was open until now."""
        was_open = self._open_until is not None
        self._num_failures = 0
        if was_open:
            self._open_until = None
            self._num_openings = 0
            self.came_back(now)
        self._trial = False
        return was_open

    def failed(self, now: float) -> bool:
        """Whether the breaker was closed until now."""
        was_open = self._open_until is not None
        self._num_failures += 1
        if not was_open and self._num_failures < OPEN_AFTER:
            return False
        if was_open and not self._trial:
            return False  # a request that was there before it opened
        self._trial = False
        self._open_until = now + min(OPEN_S * 2**self._num_openings, MAX_OPEN_S)
        self._num_openings = min(self._num_openings + 1, 16)
        return not was_open

    def cancelled(self) -> None:
        """A request ended without telling anything about the replica."""
        self._trial = False

    def came_back(self, now: float) -> None:
        """The replica takes requests from now on; it did not before."""
        self._trial = False
        self._ramp_since = now if self._slow_start_s > 0 else None

    def check_invariants(self) -> None:
        assert not self._trial or self._open_until is not None
        assert self._open_until is None or self._num_openings > 0
        assert self._num_failures >= 0
