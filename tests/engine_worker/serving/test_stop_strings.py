"""The outcome does not depend on how the text is cut, and no more is held back than must be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.serving.stop_strings import StopStrings

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[i:j] for i, j in pairwise(marks)]


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """By trying every end: the earliest, and of several stops that end there the longest."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths), end
    return None


def held_back(text: str, stops: list[str]) -> int:
    """The longest end of the text that is a proper prefix of a stop string."""
    return max(k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]))


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=8))
def test_any_cut_finds_the_same_match(text: str, stops: list[str], cuts: list[int]) -> None:
    search = StopStrings(stops)
    fed = ""
    released = 0
    for piece in pieces_of(text, cuts):
        match = search.feed(piece)
        if match is not None:
            found = (len(fed) + match[0], len(fed) + match[1])
            assert found == first_match(text, stops)
            assert released <= found[0], "part of the stop string was released"
            return
        fed += piece
        assert search.num_held == held_back(fed, stops)
        released = len(fed) - search.num_held
    assert first_match(text, stops) is None


def test_a_stop_string_over_three_pieces() -> None:
    search = StopStrings(["</end>"])
    assert search.feed("text</") is None
    assert search.num_held == 2
    assert search.feed("en") is None
    assert search.num_held == 4
    assert search.feed("d> more") == (-4, 2)


def test_a_false_start_is_given_up() -> None:
    search = StopStrings(["aab"])
    assert search.feed("aa") is None
    assert search.feed("a") is None
    assert search.num_held == 2
    assert search.feed("c") is None
    assert search.num_held == 0
