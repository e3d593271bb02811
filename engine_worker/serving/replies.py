"""The JSON of answers: whole ones and stream chunks, of chat and of plain completions.

What clients trip over, and therefore the rules here: `role` only in a choice's first delta; absent keys are absent, not
null (a `tool_calls: []` on plain text sends agents looking for calls); `object`, `id`, `created` and `model` are the
same in all chunks of an answer; `finish_reason` comes exactly once a choice; with `include_usage` a last chunk without
choices carries the usage and all others `usage: null`, and without it no chunk mentions usage.

`stop_reason` is vLLM's addition: beside a finish_reason, the stop string or the id of the stop token that ended the
text, or null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import msgspec

from engine_worker.core.types import SampledToken
from engine_worker.serving.detokenizer import Piece, PlacedToken
from engine_worker.serving.prompt_echo import prompt_logprobs
from engine_worker.serving.token_text import TokenText
from engine_worker.serving.tool_reply import ChoiceCalls
from engine_worker.serving.tool_use import ToolUse

Json = dict[str, Any]
_MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON can't say

_TEXT = "\ue000text\ue001"  # where a template has a text: what no answer's other fields contain behind it

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Template:
    """The JSON before and behind the one text in which the chunks of a choice differ."""

    before: bytes
    behind: bytes

    @classmethod
    def of(cls, chunk: bytes) -> _Template:
        """`chunk` has _TEXT as that text."""
        before, _, behind = chunk.rpartition(encode(_TEXT))
        return cls(before, behind)

    def chunk(self, text: str) -> bytes:
        return self.before + encode(text) + self.behind


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one API request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int = 0  # speculated and verified
    accepted_tokens: int = 0  # of these, what became output

    def json(self) -> Json:
        result: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.draft_tokens:
            result["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
            }
        return result


class Reply(Protocol):
    """The shape of one endpoint's answers. One object an API request."""

    def whole(self, pieces: list[Piece], usage: Usage, prompt_scores: Sequence[Sequence[SampledToken]] = ()) -> bytes:
        """The body of an answer that is not streamed. One piece a choice, in order.

        `prompt_scores` are each prompt's tokens behind the first with their logprobs, where they are to be shown.
        """
        ...

    def opening(self, index: int, has_text: bool) -> list[bytes]:
        """Chunks that a choice begins with. `has_text`: its first text follows at once."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        """Chunks for a piece that is not empty."""
        ...

    def skip(self, index: int, piece: Piece) -> None:
        """Take note of a piece whose chunks somebody else has sent."""
        ...

    def closing(self, usage: Usage) -> list[bytes]:
        """Chunks after the last choice has ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Envelope:
    """What every answer and every chunk of it repeats."""

    id: str
    object: str
    created: int
    model: str

    def json(self, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class _Answer:
    """What the two shapes share: who answers whom, and what was asked for beside the text."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        tokens: TokenText,
        num_logprobs: int | None,
        include_usage: bool,
        num_prompt_logprobs: int | None = None,
        tools: ToolUse | None = None,
    ) -> None:
        self._whole = _Envelope(id, self.whole_object, created, model)
        self._chunk = _Envelope(id, self.chunk_object, created, model)
        self._tokens = tokens
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._more: Json = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        self._tools = tools
        self._templates: dict[int, _Template] = {}  # choice -> its chunks with nothing but text

    def _plain_chunk(self, index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = _Template.of(self._text_chunk(index, _TEXT))
        return template.chunk(text)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """A chunk of nothing but text, without log probabilities."""
        raise NotImplementedError

    def closing(self, usage: Usage) -> list[bytes]:
        return [encode(self._chunk.json([], usage=usage.json()))] if self._include_usage else []


class ChatReply(_Answer):
    """With `tools`, calls are found in the text."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @cached_property
    def _calls(self) -> dict[int, ChoiceCalls]:
        """With tools: choice -> the calls in it."""
        return {}

    @cached_property
    def _held(self) -> dict[int, tuple[PlacedToken, ...]]:
        """With tools: choice -> tokens whose text is held back there."""
        return {}

    def whole(self, pieces: list[Piece], usage: Usage, prompt_scores: Sequence[Sequence[SampledToken]] = ()) -> bytes:
        more: Json = {}
        if self._num_prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(prompt_scores[0], self._num_prompt_logprobs, self._tokens)
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return encode(self._whole.json(choices, usage=usage.json(), **more))

    def _choice(self, index: int, piece: Piece) -> Json:
        assert piece.finish_reason is not None
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        reason: str = piece.finish_reason
        if self._tools is not None:
            calls = ChoiceCalls(self._tools)
            calls.push(piece.text, is_end=True)
            message, reason = calls.message(), calls.finish_reason(piece.finish_reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }

    def opening(self, index: int, has_text: bool) -> list[bytes]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        if self._tools is not None:
            return self._chunks_with_calls(index, piece, self._tools)
        if piece.finish_reason is None and self._num_logprobs is None:
            return [self._plain_chunk(index, piece.text)]
        frames = []
        if piece.text or piece.tokens:
            frames.append(self._delta(index, {"content": piece.text}, piece.tokens))
        if piece.finish_reason is not None:
            frames.append(self._delta(index, {}, finish_reason=piece.finish_reason, stop_reason=piece.stop_reason))
        return frames

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._delta(index, {"content": text})

    def _chunks_with_calls(self, index: int, piece: Piece, tools: ToolUse) -> list[bytes]:
        calls = self._calls.setdefault(index, ChoiceCalls(tools))
        tokens = self._held.pop(index, ()) + piece.tokens
        frames = []
        for delta in calls.push(piece.text, is_end=piece.finish_reason is not None):
            frames.append(self._delta(index, delta, tokens))
            tokens = ()
        if piece.finish_reason is not None:
            reason = calls.finish_reason(piece.finish_reason)
            frames.append(self._delta(index, {}, tokens, finish_reason=reason, stop_reason=piece.stop_reason))
        elif tokens:
            self._held[index] = tokens
        return frames

    def skip(self, index: int, piece: Piece) -> None:
        if self._tools is None:
            return
        calls = self._calls.setdefault(index, ChoiceCalls(self._tools))
        tokens = self._held.pop(index, ()) + piece.tokens
        if not calls.push(piece.text, is_end=False) and tokens:
            self._held[index] = tokens

    def _delta(
        self,
        index: int,
        delta: Json,
        tokens: tuple[PlacedToken, ...] = (),
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return encode(self._chunk.json([choice], **self._more))

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if self._num_logprobs is None:
            return None
        return {"content": [self._token(placed) for placed in tokens], "refusal": None}

    def _token(self, placed: PlacedToken) -> Json:
        token = placed.token
        top = token.top_logprobs[: self._num_logprobs]
        return {
            **self._entry(token.token_id, token.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        return {
            "token": self._tokens.string_of(token_id),
            "logprob": _clamped(logprob),
            "bytes": list(self._tokens.bytes_of(token_id)),
        }


class CompletionReply(_Answer):
    """Plain completions have no tools."""

    whole_object = chunk_object = "text_completion"

    def whole(self, pieces: list[Piece], usage: Usage, prompt_scores: Sequence[Sequence[SampledToken]] = ()) -> bytes:
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        if self._num_prompt_logprobs is not None:
            n = len(pieces) // len(prompt_scores)
            for index, choice in enumerate(choices):
                scores = prompt_scores[index // n]
                choice["prompt_logprobs"] = prompt_logprobs(scores, self._num_prompt_logprobs, self._tokens)
        return encode(self._whole.json(choices, usage=usage.json()))

    def opening(self, index: int, has_text: bool) -> list[bytes]:
        return [] if has_text else self.chunks(index, Piece())

    def chunks(self, index: int, piece: Piece) -> list[bytes]:
        if piece.finish_reason is None and self._num_logprobs is None:
            return [self._plain_chunk(index, piece.text)]
        return [self._whole_chunk(index, piece)]

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._whole_chunk(index, Piece(text))

    def _whole_chunk(self, index: int, piece: Piece) -> bytes:
        return encode(self._chunk.json([self._choice(index, piece)], **self._more))

    def skip(self, index: int, piece: Piece) -> None:
        pass

    def _choice(self, index: int, piece: Piece) -> Json:
        ended = {} if piece.finish_reason is None else {"stop_reason": piece.stop_reason}
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **ended,
        }

    def _logprobs(self, piece: Piece) -> Json | None:
        if self._num_logprobs is None:
            return None
        return {
            "tokens": [self._tokens.string_of(placed.token.token_id) for placed in piece.tokens],
            "token_logprobs": [_clamped(placed.token.logprob) for placed in piece.tokens],
            "top_logprobs": [self._top(placed) for placed in piece.tokens],
            "text_offset": [placed.offset for placed in piece.tokens],
        }

    def _top(self, placed: PlacedToken) -> Json | None:
        """String -> logprob, likeliest first, the sampled token among them. Of equal strings the likelier counts.

        None for a prompt's first token, which has no logprob.
        """
        token = placed.token
        if token.logprob is None:
            return None
        result: Json = {}
        for token_id, logprob in token.top_logprobs[: self._num_logprobs]:
            result.setdefault(self._tokens.string_of(token_id), _clamped(logprob))
        result.setdefault(self._tokens.string_of(token.token_id), _clamped(token.logprob))
        return result


def _clamped(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)
