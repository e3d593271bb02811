"""OpenAI chat messages, as clients send them, made into what chat templates expect. Errors name the place.

The rules, in the order they apply to a message:

* Keys whose value is null are dropped: templates print "None", but handle an absent key.
* `developer` becomes `system` where the template does not know it (it is OpenAI's newer name for the same thing).
* Content given as a list of parts is joined into one string, unless the template loops over parts. Content given as a
  string stays one, unless the template can only loop. Parts other than text are refused.
* `tool_calls[].function.arguments` is JSON text in OpenAI's API and an object in templates. Text that is no JSON object
  (a truncated call that a client sends back) stays text.
* Reasoning is sent back under several names; a template finds it under `reasoning_content`, and gpt-oss's under
  `thinking`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from engine_worker.contract.errors import ApiError
from engine_worker.contract.template import ContentStyle

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")  # a role is pasted between special tokens, so no free text
_REASONING = ("reasoning_content", "thinking", "reasoning")


class PromptError(ApiError):
    """A prompt that can't be rendered or tokenized: 400, with a sentence for the client."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def template_messages(messages: Any, style: ContentStyle, knows_developer: bool) -> list[dict[str, Any]]:
    """New message dicts for the template; `messages` itself is not changed. Raises PromptError."""
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError("`messages` must be a list with at least one message.", param="messages")
    return [_message(message, f"messages[{i}]", style, knows_developer) for i, message in enumerate(messages)]


def template_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as given, in their own key order; an empty list counts as none. Raises PromptError."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list | tuple):
        raise PromptError("`tools` must be a list of tools.", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise PromptError(f"tools[{i}] must be an object with `type` and `function`.", param=f"tools[{i}]")
    return list(tools)


def _message(message: Any, where: str, style: ContentStyle, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be an object with `role` and `content`.", param=where)
    result = {key: value for key, value in message.items() if value is not None}
    role = result.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise PromptError(
            f"{where}.role must be one of developer, system, user, assistant and tool.", param=f"{where}.role"
        )
    if role == "developer" and not knows_developer:
        result["role"] = "system"
    if "content" in result:
        result["content"] = _content(result["content"], f"{where}.content", style)
    elif role not in ("assistant", "function"):
        raise PromptError(f"{where}.content is missing.", param=f"{where}.content")
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
        if not result["tool_calls"]:
            del result["tool_calls"]  # templates ask whether the key is there
    return _with_reasoning(result)


def _content(content: Any, where: str, style: ContentStyle) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if style == "parts" else content
    if not isinstance(content, list | tuple):
        raise PromptError(f"{where} must be a string or a list of text parts.", param=where)
    texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if style == "string":
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        named = f"is of type {kind!r}" if isinstance(kind, str) else "has no type"
        raise PromptError(f"{where} {named}; this model reads text only. Send parts of type 'text'.", param=where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise PromptError(f"{where}.{kind} must be a string.", param=f"{where}.{kind}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise PromptError(f"{where} must be a list.", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where} must have a `function` with a `name`.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function = {**function, "arguments": _parsed(arguments)}
    return {**call, "function": function}


def _parsed(arguments: str) -> dict[str, Any] | str:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    if not isinstance(reasoning, str):
        # OpenAI's Responses API and others send structures here, which no chat template reads.
        return {key: value for key, value in message.items() if key not in _REASONING}
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def last_text(messages: Sequence[dict[str, Any]]) -> str | None:
    """The last message's text, or None where it has none: what `continue_final_message` goes on from."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        return content[-1]["text"] if content else None
    return content
