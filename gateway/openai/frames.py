"""The parts of a replica's answer, or of one event of its stream, that the gateway looks at."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import force_setattr

from gateway.answer_head import MAX_TOKENS


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """A figure that no answer can have counts as none: bills and totals are made of them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    def __post_init__(self) -> None:
        if not _is_sane(self.prompt_tokens):
            force_setattr(self, "prompt_tokens", None)
        if not _is_sane(self.completion_tokens):
            force_setattr(self, "completion_tokens", None)
        if self.prompt_tokens_details is not None and not _is_sane(self.prompt_tokens_details.cached_tokens):
            force_setattr(self, "prompt_tokens_details", None)

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


def _is_sane(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_TOKENS


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class Frame(msgspec.Struct, frozen=True):
    """The parts of a response or of one streamed chunk that the gateway looks at."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None

    @property
    def finished(self) -> bool:
        return any(choice.finish_reason for choice in self.choices or ())

    @property
    def failure(self) -> dict[str, Any] | None:
        """The error that this frame reports, in any of the shapes in use."""
        if self.error is not None:
            return self.error if isinstance(self.error, dict) else {"message": str(self.error)}
        if self.object == "error":
            return {"message": self.message, "code": self.code}
        return None


FRAME = msgspec.json.Decoder(Frame)
