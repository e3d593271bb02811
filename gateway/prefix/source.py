"""What of a request determines its prompt, as `PrefixService.chains` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class PromptSource(msgspec.Struct, frozen=True, kw_only=True):
    """A chat (`messages`) or a plain completion (`prompt`): exactly one of the two.

    messages, tools, chat_template_kwargs
                   as decoded from JSON, with the client's key order; never changed here
    prompt         text, or token ids; a request with several prompts is keyed by its first
    adapter        the LoRA adapter that the request asks for ("" for the model itself)
    salt           the cache salt that the replica will get with the request ("" for none)
    reasoning_effort
                   OpenAI's field of that name, which templates read as a template argument
    add_special_tokens
                   None is the default: no for a chat, yes for a prompt
    own_template   the request brings a chat template of its own, so that it has no token-mode chains
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | None = None
    adapter: str = ""
    salt: str = ""
    add_special_tokens: bool | None = None
    own_template: bool = False

    def first_prompt(self) -> str | Sequence[int] | None:
        """The text or the ids of the first prompt; None for a chat and for an empty list."""
        prompt = self.prompt
        if prompt is None or isinstance(prompt, str):
            return prompt
        if not prompt:
            return None
        first = prompt[0]
        if isinstance(first, int):
            return prompt  # type: ignore[return-value]  # its first item says that it is a list of ids
        return first
