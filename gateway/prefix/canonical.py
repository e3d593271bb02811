"""A prompt's canonical text, for replicas whose tokenizer is not at hand.

It need not look like the engine's prompt. It must be equal where the engine's prompts are equal, and grow at its end
where the conversation does: tools first (templates put them into the system part), then each message as its role and
what it says. Separators are control characters, so that one message can hardly look like two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.prefix.keys import pack_ids
from gateway.prefix.source import PromptSource

_FIELD: Final = "\x1f"
_RECORD: Final = "\x1e"


def canonical_prompt(source: PromptSource) -> tuple[str, bytes | None]:
    """The kind of prompt (kinds never share a prefix) and its text; None where it is no prompt at all."""
    if source.messages is not None:
        return "chat", chat_text(source.messages, source.tools)
    prompt = source.first_prompt()
    if isinstance(prompt, str):
        return "prompt", prompt.encode("utf-8", "surrogatepass")
    try:
        return "ids", pack_ids(prompt or ())
    except (OverflowError, TypeError):
        return "ids", None


def chat_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    """UTF-8 bytes. Never fails on what JSON can hold, whatever its shape."""
    pieces = [f"tools{_FIELD}{_json(tools)}{_RECORD}"] if tools else []
    pieces.extend(_message(message) for message in messages)
    return "".join(pieces).encode("utf-8", "surrogatepass")


def _message(message: Any) -> str:
    if not isinstance(message, dict) and not isinstance(message, Mapping):  # the first test is the cheap one
        return _json(message) + _RECORD
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else _content(content)
    if calls:
        return f"{role}{_FIELD}{text}{_FIELD}{_json(calls)}{_RECORD}"
    return f"{role}{_FIELD}{text}{_RECORD}"


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        return _json(content)
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    """A text part reads like the same text given as a string."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    return _json(part)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
