"""Where a subscriber stands in a publisher's sequence of batches. No I/O.

Batches are numbered from 0 in each life of the publisher, and nothing in a message names the life. So a batch that was
seen before is told from another life's batch with the same number by its payload, of which a digest is kept (payloads
carry a timestamp, so two lives do not repeat each other).
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from xxhash import xxh3_64_intdigest


class Place(StrEnum):
    """NEXT: apply it. SEEN: drop it. GAP: batches before it are missing. OTHER_LIFE: the publisher started anew."""

    NEXT = "next"
    SEEN = "seen"
    GAP = "gap"
    OTHER_LIFE = "other_life"


class Cursor:
    """`expected` is the number of the next batch. Digests of the last `window` applied batches are kept."""

    def __init__(self, window: int = 20_000) -> None:
        self.expected = 0
        self._digests: OrderedDict[int, int] = OrderedDict()
        self._window = window

    def place(self, sequence: int, payload: bytes) -> Place:
        if sequence == self.expected:
            return Place.NEXT
        if sequence > self.expected:
            return Place.GAP
        # One that fell out of the window is older than what any replay overlaps with.
        return Place.SEEN if self._digests.get(sequence) == xxh3_64_intdigest(payload) else Place.OTHER_LIFE

    def applied(self, sequence: int, payload: bytes) -> None:
        """`sequence` was dealt with; what lies between it and the one expected is given up."""
        assert sequence >= self.expected
        self.expected = sequence + 1
        self._digests[sequence] = xxh3_64_intdigest(payload)
        if len(self._digests) > self._window:
            self._digests.popitem(last=False)

    def restart(self) -> None:
        self.expected = 0
        self._digests.clear()

    def check_invariants(self) -> None:
        assert len(self._digests) <= self._window
        assert all(sequence < self.expected for sequence in self._digests)
