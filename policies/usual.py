"""What is usual in the fleet lately: how long answers are, and how many requests an arrival finds waiting.

The queue is looked at when requests are dispatched: what arrivals find is what holds over time, if they come as chance
has it. It is a mean over QUEUE_WINDOW dispatches a replica, so it follows the load within seconds where there is much
and does not forget it between two requests where there is little.
"""

from __future__ import annotations

from typing import Final

from policies.replica import Replica

OUTPUT_WEIGHT: Final = 0.05  # of a new request in the mean output
QUEUE_WINDOW: Final = 25


class Usual:
    """`num_output_tokens` of a request; `queue`, the requests waiting at a replica; each one's own is kept with it."""

    __slots__ = ("num_output_tokens", "queue")

    def __init__(self, num_output_tokens: float) -> None:
        self.num_output_tokens = num_output_tokens
        self.queue = 0.0

    def finished(self, num_output_tokens: int) -> None:
        self.num_output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self.num_output_tokens)

    def dispatching(self, replicas: tuple[Replica, ...]) -> None:
        """A request is about to be sent to one of `replicas`."""
        num_waiting, weight = 0, 1.0 / (QUEUE_WINDOW * len(replicas))
        for replica in replicas:
            waiting = len(replica.load.waiting)
            num_waiting += waiting
            replica.typical_queue += weight * (waiting - replica.typical_queue)
        self.queue += weight * (num_waiting / len(replicas) - self.queue)
