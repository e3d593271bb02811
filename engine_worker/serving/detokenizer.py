"""One sequence's sampled tokens made into text to send: characters whole, stop strings cut, logprobs beside their text.

Text is released when it can no longer change: not before its last character is complete, and not while its end could
be the beginning of a stop string (or of a call that is not to be repeated, repeated_calls.py). A token's logprobs are
released with the first of its text, so that what a client has received of both always matches.

The token that ends a sequence (an end-of-sequence or stop token) has no text and no logprobs in the answer, unless
`include_stop` asks for it. Tokens behind a stop string's cut are dropped with their logprobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving.repeated_calls import RepeatedCalls
from engine_worker.serving.stop_strings import StopStrings
from engine_worker.serving.token_text import TextStream


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A sampled token and where its text begins in the sequence's output, in characters."""

    token: SampledToken
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be sent now. `finish_reason` is set exactly once, on the last piece, and with it `stop_reason`: the
    stop string, or the id of the stop token, that ended the text; None where neither did."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.finish_reason is None


_NOTHING = Piece()


class SequenceText:
    """The output text of one sequence. After a piece with a finish_reason nothing more may be pushed."""

    def __init__(
        self,
        stream: TextStream,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        repeats: RepeatedCalls | None = None,
    ) -> None:
        self._stream = stream
        self._stop_token_ids = stop_token_ids
        self._stop_reason: str | int | None = None
        self._stops = StopStrings(stops) if stops else None
        self._repeats = repeats
        self._is_plain = self._stops is None and repeats is None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # text not released yet
        self._num_released = 0  # characters released
        self._pending: list[tuple[PlacedToken, int]] = []  # not released, each with the end of its text
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(
        self, token: SampledToken | None, finish_reason: FinishReason | None, *, is_complete: bool = False
    ) -> Piece:
        """The next token, and why the engine ended the sequence if it did.

        `is_complete`: a grammar's end ended it, so that the last token is no stop token but text.
        """
        assert self.finish_reason is None, "a finished sequence got another token"
        if token is not None:
            self.num_tokens += 1
            if finish_reason is None and self._is_plain and not self._pending:
                return self._pass_on(token)
            if finish_reason is FinishReason.STOP and token.token_id in self._stop_token_ids:
                self._stop_reason = token.token_id
            if finish_reason is not FinishReason.STOP or self._include_stop or is_complete:
                cut = self._add(token, self._stream.push(token.token_id))
                if cut is not None:
                    return self._finish_at(cut)
        if finish_reason is None:
            return self._release(len(self._held) - self._num_held_back)
        cut = self._add(None, self._stream.flush())
        if cut is not None:
            return self._finish_at(cut)
        self.finish_reason = finish_reason
        return self._release(len(self._held))

    def _pass_on(self, token: SampledToken) -> Piece:
        """What most tokens come to: nothing is held, nothing can be cut off, and text goes out as it comes."""
        start, text = self._num_released, self._stream.push(token.token_id)
        if not text:
            self._pending.append((PlacedToken(token, start), start))
            return _NOTHING
        self._num_released = start + len(text)
        return Piece(text, (PlacedToken(token, start),))

    def drop(self) -> Piece:
        """End without the token that the engine made: only the prompt was wanted."""
        assert self.finish_reason is None
        self.finish_reason = FinishReason.LENGTH
        return Piece("", (), self.finish_reason)

    def _add(self, token: SampledToken | None, text: str) -> int | None:
        """Take in a token's text. Gives where in the held text the output ends, if a stop string or a repeated call is
        complete."""
        start = self._num_released + len(self._held)
        before = len(self._held)
        self._held += text
        if token is not None:
            self._pending.append((PlacedToken(token, start), start + len(text)))
        if not text or self.num_tokens <= self._min_tokens:
            return None
        match = self._stops.feed(text) if self._stops is not None else None
        if match is None:
            repeat = self._repeats.feed(text) if self._repeats is not None else None
            return None if repeat is None else before + repeat
        start, end = match
        self._stop_reason = self._held[before + start : before + end]
        return before + (end if self._include_stop else start)

    @property
    def _num_held_back(self) -> int:
        """Characters at the end of what is there that may have to be cut off."""
        return max(watch.num_held if watch is not None else 0 for watch in (self._stops, self._repeats))

    def _finish_at(self, cut: int) -> Piece:
        """End with the text up to `cut`; tokens whose text begins behind it are dropped."""
        assert cut >= 0, "part of a stop string was released"
        self._held = self._held[:cut]
        end = self._num_released + cut
        self._pending = [(placed, min(stop, end)) for placed, stop in self._pending if placed.offset < end]
        self.finish_reason = FinishReason.STOP
        return self._release(cut)

    def _release(self, num_chars: int) -> Piece:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_released += len(text)
        if self.finish_reason is not None:
            at = len(self._pending)
        else:  # a token without text (part of a character) goes with the one that completes it
            shown = [i for i, (placed, end) in enumerate(self._pending) if placed.offset < min(end, self._num_released)]
            at = shown[-1] + 1 if shown else 0
        tokens = tuple(placed for placed, _ in self._pending[:at])
        self._pending = self._pending[at:]
        stop_reason = self._stop_reason if self.finish_reason is FinishReason.STOP else None
        return Piece(text, tokens, self.finish_reason, stop_reason)
