"""What a request may need at most, before anybody has tokenized it: a quick guess, which the real usage replaces.

Only what a template puts into the prompt is counted (messages, tools, a prompt's text), at four bytes of UTF-8 a token;
token ids count one each. An image or a sound is many bytes and few tokens, so each counts the same. Everything else in
a body (a user's name, a schema, the base64 of an image) costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.openai.fields import ParsedRequest
from gateway.prefix.source import PromptSource

EXPECTED_OUTPUT_TOKENS: Final = 256  # of a request that sets no limit of its own
BYTES_PER_TOKEN: Final = 4
TOKENS_PER_MEDIUM: Final = 1024
_PART_TEXTS: Final = ("text", "refusal", "thinking")


def estimate(parsed: ParsedRequest) -> tuple[int, int]:
    """Prompt and output tokens."""
    source = parsed.source
    if source is None:  # embeddings: seldom, so that they may be read once more
        return prompt_tokens(msgspec.json.decode(parsed.body).get("input")), 0
    given = parsed.max_output_tokens
    output = (EXPECTED_OUTPUT_TOKENS if given is None else given) * parsed.num_choices
    return (prompt_tokens(source.prompt) if source.messages is None else _chat_tokens(source)), output


def prompt_tokens(prompt: Any) -> int:
    """Of a text, of token ids, or of a list of either."""
    if isinstance(prompt, str):
        return _num_bytes(prompt) // BYTES_PER_TOKEN
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        return len(prompt)
    return sum([prompt_tokens(each) for each in prompt])


def _chat_tokens(source: PromptSource) -> int:
    num_bytes = num_media = 0
    assert source.messages is not None
    for message in source.messages:
        for value in message.values():
            if isinstance(value, str):  # role and name, too: templates write them
                num_bytes += _num_bytes(value)
            elif isinstance(value, list):
                for part in value:
                    size = _part_bytes(part)
                    num_bytes += size
                    num_media += not size
    for rendered in (source.tools, source.chat_template_kwargs):
        if rendered:
            num_bytes += len(msgspec.json.encode(rendered))
    return num_bytes // BYTES_PER_TOKEN + num_media * TOKENS_PER_MEDIUM


def _part_bytes(part: Any) -> int:
    """Of a content part's text, or of a tool's call; 0 for an image or a sound."""
    if not isinstance(part, Mapping):
        return _num_bytes(part) if isinstance(part, str) else 1
    for name in _PART_TEXTS:
        if isinstance(text := part.get(name), str):
            return _num_bytes(text) or 1
    return len(msgspec.json.encode(part)) if "function" in part else 0


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
