"""From a request to token ids, the same in the worker and in the gateway.

The worker must see exactly the prompt that the model was trained on, and the gateway must see exactly the worker's, or
its block keys name other blocks. So both use this one class, over the same `TokenizerBundle`, and what it does equals
transformers' `apply_chat_template` and tokenizer (tests hold them against each other).

A rendered chat already contains its special tokens: it is encoded without adding any (a doubled BOS is a classic
fault). A completion's plain text gets the ones that the tokenizer's post-processor adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from tokenizers import Tokenizer

from engine_worker.contract.messages import PromptError, last_text, template_messages, template_tools
from engine_worker.contract.state import TokenizerBundle
from engine_worker.contract.template import Changes, ChatTemplate, TemplateLimit, TemplateRefused
from engine_worker.contract.tools import with_tools_as_text

__all__ = ["ALLOWED_TEMPLATE_KWARGS", "PromptError", "PromptRenderer", "template_kwargs"]

# What `chat_template_kwargs` may set: switches that published templates document. Everything else is refused, because a
# template's variables include the conversation itself and the special tokens.
ALLOWED_TEMPLATE_KWARGS = frozenset(
    {
        "add_vision_id",
        "builtin_tools",
        "clear_thinking",
        "custom_tools",
        "date_string",
        "documents",
        "enable_thinking",
        "keep_all_reasoning",
        "model_identity",
        "preserve_thinking",
        "python_tools",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "xml_tools",
    }
)

_MARK = "\ue000continue\ue001 "  # private-use characters; the trailing blank shows whether the template trims


class PromptRenderer:
    """Renders and tokenizes for one model. Safe to use from several threads; holds no state of a request.

    max_chars     the most that a rendered chat may have; the tokenizer is not even asked about more
    max_render_s  the longest that the template may run
    Raises ValueError where the bundle's tokenizer can't be read. A bundle without a chat template still encodes plain
    text; a chat then raises PromptError.
    """

    def __init__(self, bundle: TokenizerBundle, *, max_chars: int = 8_000_000, max_render_s: float = 5.0) -> None:
        try:
            self.tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"the tokenizer can't be read: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.bundle = bundle
        self._max_chars = max_chars
        self._max_render_s = max_render_s
        self._template: ChatTemplate | None = None
        self._template_fault = "This model has no chat template; use /v1/completions, or serve a model that has one."
        if bundle.chat_template is not None:
            self._compile(bundle.chat_template)

    def _compile(self, source: str) -> None:
        try:
            self._template = ChatTemplate(source, max_chars=self._max_chars, max_seconds=self._max_render_s)
        except (jinja2.TemplateError, TemplateLimit, RecursionError) as error:
            self._template_fault = f"The model's chat template can't be used: {error}"

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; None where it has none that can be used."""
        return self._template

    @property
    def knows_tools(self) -> bool:
        """Whether the template itself shows tools; otherwise they are described in the system message."""
        return self._template is not None and self._template.knows_tools

    @property
    def template_changes(self) -> Changes:
        """How often equal messages render differently (see ChatTemplate.changes)."""
        return "never" if self._template is None else self._template.changes

    @property
    def changes_every_second(self) -> bool:
        """The template prints the time of day: no two requests share a prefix behind it. Worth a warning."""
        return self.template_changes == "every_second"

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `messages` and `tools` as parsed from JSON; neither is changed. Raises PromptError."""
        template = self._template
        if template is None:
            raise PromptError(self._template_fault, param="messages")
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "`continue_final_message` goes on with the last message, `add_generation_prompt` starts a new one: "
                "set only one of them.",
                param="continue_final_message",
            )
        prepared = template_messages(messages, template.content_style, template.knows_developer)
        shown_tools = template_tools(tools)
        if not template.knows_tools:
            prepared = with_tools_as_text(prepared, shown_tools)
        variables: dict[str, Any] = {
            **self.bundle.special_tokens,
            "documents": None,
            **_allowed(chat_template_kwargs),
            "messages": prepared,
            "tools": shown_tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            return self._render_open(template, prepared, variables)
        return self._render(template, variables)

    def _render(self, template: ChatTemplate, variables: dict[str, Any]) -> str:
        try:
            return template.render(variables)
        except TemplateRefused as error:
            raise PromptError(f"The model's chat template refused the messages: {error}", param="messages") from error
        except Exception as error:
            # A template is a program: messages of a shape it did not foresee can make it fail in any way.
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateLimit) else str(error)
            raise PromptError(f"The model's chat template failed on these messages ({reason}).") from error

    def _render_open(self, template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The text up to the end of the last message's content, without what the template puts after it."""
        text = last_text(messages)
        if text is None:
            raise PromptError("`continue_final_message` needs a last message with content.", param="messages")
        content = messages[-1]["content"]
        if isinstance(content, list):
            messages[-1]["content"] = [*content[:-1], {**content[-1], "text": text + _MARK}]
        else:
            messages[-1]["content"] = text + _MARK
        rendered = self._render(template, variables)
        at = rendered.rfind(_MARK.strip())
        if at < 0 or text.strip() not in rendered:
            raise PromptError(
                "This model's chat template does not show the last message as it is, so it can't be continued.",
                param="continue_final_message",
            )
        if rendered[at : at + len(_MARK)] == _MARK:
            return rendered[:at]
        return rendered[:at].rstrip()  # the template trims contents, so a trimmed end is what the model knows

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, special tokens inside it recognised. Raises PromptError on text that is no Unicode."""
        if len(text) > self._max_chars:
            raise PromptError(
                f"The prompt has {len(text)} characters; at most {self._max_chars} are read.",
                code="context_length_exceeded",
            )
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:  # lone surrogates
            raise PromptError("The prompt contains characters that are not valid Unicode.") from error
        return ids

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a chat, ready for the model. Raises PromptError.

        `add_special_tokens` puts the tokenizer's own around it, for a template that leaves them out (vLLM's field).
        """
        text = self.render_chat(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        return self.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`. Raises PromptError on an id that the vocabulary can't have."""
        try:
            text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise PromptError("Token ids must be integers from 0 up.", param="tokens") from error
        return text


def template_kwargs(kwargs: Mapping[str, Any] | None, reasoning_effort: str | None) -> Mapping[str, Any] | None:
    """A request's `chat_template_kwargs` with its top-level `reasoning_effort` beside them (they overrule it)."""
    if reasoning_effort is None:
        return kwargs
    return {"reasoning_effort": reasoning_effort, **(kwargs or {})}


def _allowed(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    if not kwargs:
        return {}
    if not isinstance(kwargs, Mapping):
        raise PromptError("`chat_template_kwargs` must be an object.", param="chat_template_kwargs")
    refused = sorted(str(key) for key in kwargs if key not in ALLOWED_TEMPLATE_KWARGS)
    if refused:
        raise PromptError(
            f"`chat_template_kwargs` may not set {', '.join(refused)}; "
            f"allowed are {', '.join(sorted(ALLOWED_TEMPLATE_KWARGS))}.",
            param="chat_template_kwargs",
        )
    return dict(kwargs)
