"""A text's ids, piece by piece, as far as the event loop has the time for it."""

from __future__ import annotations

from typing import Final

from engine_worker.contract.prompt import PromptError, PromptRenderer
from gateway.prefix.tokenize import SegmentCache, Splitter, encode_piece
from gateway.prefix.words import Words

MAX_CHARS: Final = 300_000  # to cut and look up, should all of it be known: a quarter of a millisecond
SHORT_CHARS: Final = 160  # words are looked up as quickly as a piece of so many is remembered
INLINE_ENCODE_CHARS: Final = 800  # about 0.2 ms of BPE, which is what the way to a thread and back costs

WORDS_SPEED: Final = 5  # how much quicker known words are


class Pieces:
    """One tokenizer's. `words` is None where its words can't be told. What a prompt may cost begins with `begin`."""

    def __init__(self, renderer: PromptRenderer, splitter: Splitter, words: Words | None, cache: SegmentCache) -> None:
        self._renderer = renderer
        self._splitter = splitter
        self._words = words
        self._cache = cache
        self._left_chars = 0
        self._left_encode = 0

    def begin(self) -> None:
        """Another prompt."""
        self._left_chars = MAX_CHARS
        self._left_encode = INLINE_ENCODE_CHARS

    def begins_apart(self, text: str) -> bool:
        """Whether the text may be cut off from whatever stands in front of it."""
        return self._splitter.begins_apart(text)

    def ids(self, text: str) -> bytes | None:
        """Packed ids of a text that begins where one can cut; None where that takes too long, or can't be told why it
        fails."""
        self._left_chars -= len(text)
        if self._left_chars < 0:
            return None
        found: list[bytes] = []
        for piece in self._splitter.split(text):
            is_short = len(piece) <= SHORT_CHARS
            packed = self._words.packed(piece) if is_short and self._words is not None else None
            if packed is None:
                packed = self._cache.get(piece)
            if packed is None:
                packed = self._fresh(piece, is_short)
                if packed is None:
                    return None
                self._cache.put(piece, packed)
            found.append(packed)
        return b"".join(found)

    def _fresh(self, piece: str, is_short: bool) -> bytes | None:
        if not is_short and self._words is not None and len(piece) <= self._left_encode * WORDS_SPEED:
            packed = self._words.packed(piece)
            if packed is not None:
                self._left_encode -= len(piece) // WORDS_SPEED
                return packed
        self._left_encode -= len(piece)
        if self._left_encode < 0:
            return None
        try:
            return encode_piece(self._renderer, piece)
        except PromptError:
            return None
