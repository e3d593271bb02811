"""Guesses without a model: what followed the last few tokens when they stood in this text before.

Prompt lookup (Saxena 2023): answers copy from their prompts, code and tables repeat themselves. The longest suffix of
prompt and output, up to `max_ngram` tokens, that occurs earlier is looked for, the latest place of equally long ones;
what followed there is the guess. Where that runs into the end of the text it goes on with the guess itself, so a loop
is guessed as long as is asked for. A suffix shorter than `min_ngram` counts as chance.

The text is an array that grows with the output, searched by numpy: one pass finds the places of the last token, and
each longer suffix only thins these out. That is some 10 us for ten thousand tokens, less than keeping an index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_worker.core.types import Request


class _Text:
    """One request's tokens so far."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.length = 0
        self._buffer = np.empty(2 * len(prompt_ids) + 64, dtype=np.int64)
        self._append(prompt_ids)

    def follow(self, request: Request) -> npt.NDArray[np.int64]:
        """Prompt and output. Output is never taken back but for drafts, which are not in it."""
        new = request.output_ids[self.length - len(request.prompt_ids) :]
        if new:
            self._append(new)
        return self._buffer[: self.length]

    def _append(self, token_ids: Sequence[int]) -> None:
        end = self.length + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(end, dtype=np.int64)])
        self._buffer[self.length : end] = token_ids
        self.length = end


class NgramDrafter:
    """`propose` guesses for each request from its own text; `release` forgets a request."""

    name = "ngram"
    needs_slots = False  # guessing computes nothing, so it comes before the decision how many are worth trying

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._min, self._max = min_ngram, max_ngram
        self._texts: dict[str, _Text] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]:
        """For each (request, most tokens): the guess, () for none."""
        return [self._guess(request, most) for request, most in wanted]

    def release(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    @property
    def num_states(self) -> int:
        return len(self._texts)

    def _guess(self, request: Request, most: int) -> tuple[int, ...]:
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = _Text(request.prompt_ids)
        ids = text.follow(request)
        place = last_match(ids, self._min, self._max)
        if place is None:
            return ()
        period = len(ids) - place  # behind the text, the guess repeats what lies a period back
        return tuple(ids[place + np.arange(most) % period].tolist())


def last_match(ids: npt.NDArray[np.int64], min_ngram: int, max_ngram: int) -> int | None:
    """Where the longest suffix of `ids` (`min_ngram` to `max_ngram` long) that stands there before ends, exclusively.

    Of places with equally long suffixes, the last one.
    """
    places = np.flatnonzero(ids[:-1] == ids[-1]) if len(ids) else ids[:0]
    found = None
    for length in range(1, max_ngram + 1):
        if length > 1:
            places = places[places >= length - 1]
            places = places[ids[places - (length - 1)] == ids[-length]] if length <= len(ids) else places[:0]
        if not len(places):
            break
        if length >= min_ngram:
            found = int(places[-1]) + 1
    return found
