"""The parts of a replica's answer, or of one event of its stream, that the gateway looks at."""

from __future__ import annotations

from typing import Any

import msgspec


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


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
