"""How many requests a replica serves at once, learned from what it reports.

Engines take in whatever comes and queue it, first come first served, so a flood that reaches an engine is ahead of
everybody who comes later. Where the order between tenants is to be decided in the gateway, a replica must get little
more than it can run. What that is depends on the engine, its memory and the prompts, and shows when the engine reports
requests waiting at two polls running: then it runs about as many as it can. A quarter more, for what ends between two
polls, keeps it busy. When it reports no queue, the bound doubles until it is gone.
"""

from __future__ import annotations

SURPLUS = 0.25
LEAST_SURPLUS = 2
FORGET = 4096


class Room:
    """`num_slots`: requests that the replica should have at most; 0 while nothing is known against more."""

    __slots__ = ("_was_full", "num_slots")

    def __init__(self) -> None:
        self.num_slots = 0
        self._was_full = False

    def reported(self, num_running: int, num_waiting: int) -> None:
        """What a poll said."""
        is_full = num_waiting > 0 and num_running > 0
        if is_full and self._was_full:
            self.num_slots = num_running + max(LEAST_SURPLUS, int(num_running * SURPLUS))
        elif not num_waiting and self.num_slots:
            self.num_slots *= 2
            if self.num_slots > FORGET:
                self.num_slots = 0
        self._was_full = is_full
