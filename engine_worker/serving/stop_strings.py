"""Stop strings in a text that arrives in pieces.

Each stop string has a Knuth-Morris-Pratt automaton whose state is how much of the string the text's end could be the
beginning of. So the outcome is the same however the text is cut into pieces: the first stop string to be complete
wins (of those that complete at the same character the longest), and at any moment exactly the characters that could
still become one are held back: a proper prefix of a stop string, no more.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches one sequence's text. `num_held` characters at the end of what was fed may be part of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self.num_held = 0

    def feed(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the match, relative to the start of `text` (a start may be negative), or None.

        After a match the object is spent.
        """
        for at, char in enumerate(text):
            longest = 0
            for i, stop in enumerate(self._stops):
                state = self._states[i]
                failure = self._failures[i]
                while state and stop[state] != char:
                    state = failure[state - 1]
                state += stop[state] == char
                if state == len(stop):
                    longest = max(longest, state)
                    state = failure[state - 1]
                self._states[i] = state
            if longest:
                return at + 1 - longest, at + 1
        self.num_held = max(self._states, default=0)
        return None


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[state] != stop[i]:
            state = table[state - 1]
        state += stop[state] == stop[i]
        table[i] = state
    return table
