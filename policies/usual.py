"""What is usual in the fleet lately: how long answers are, and how many requests wait at a replica.

The queue is a mean over time. What arrivals find is the same where they come as chance has it, but where they come in
bursts they find each other: most of a burst sees a queue, and it is over before anybody else comes. It is the mean over
the time that QUEUE_WINDOW dispatches a replica take, so it follows the load within seconds where there is much and does
not forget it between two requests where there is little. A pause longer than PAUSE_S counts as that much: what a night
was like says nothing about the morning.
"""

from __future__ import annotations

from typing import Final

from policies.replica import Replica

OUTPUT_WEIGHT: Final = 0.05  # of a new request in the mean output
QUEUE_WINDOW: Final = 25
PAUSE_S: Final = 30.0


class Usual:
    """`num_output_tokens` of a request; `queue`, the requests waiting at a replica; each one's own is kept with it."""

    __slots__ = ("_interval_s", "_last_at", "num_output_tokens", "queue")

    def __init__(self, num_output_tokens: float) -> None:
        self.num_output_tokens = num_output_tokens
        self.queue = 0.0
        self._interval_s = 0.0  # from a dispatch to the next, the mean
        self._last_at: float | None = None

    def finished(self, num_output_tokens: int) -> None:
        self.num_output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self.num_output_tokens)

    def dispatching(self, replicas: tuple[Replica, ...], at: float) -> None:
        """A request is about to be sent to one of `replicas`."""
        weight = 1.0 / (QUEUE_WINDOW * len(replicas))
        passed_s = 0.0 if self._last_at is None else max(at - self._last_at, 0.0)
        part = PAUSE_S / passed_s if passed_s > PAUSE_S else 1.0
        self._last_at = at
        self._interval_s += weight * (passed_s * part - self._interval_s)
        total = 0.0
        for replica in replicas:
            waited_s = part * replica.load.take_waited_s(at)
            replica.waited_s += weight * (waited_s - replica.waited_s)
            if self._interval_s > 0.0:
                replica.typical_queue = replica.waited_s / self._interval_s
            total += replica.typical_queue
        self.queue = total / len(replicas)
