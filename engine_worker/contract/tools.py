"""Tools for models whose chat template has never heard of them.

Such a template prints roles and contents and nothing else. So the tools are described in the system message, calls that
the model made are part of its message's text, and results come back in a user message, in the tags that most models
trained on tools know (Hermes's): `<tool_call>` around a JSON object with `name` and `arguments`, `<tool_response>`
around a result. Gateway and worker both render through here, so that their prompts stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_RESULT_BEGIN, _RESULT_END = "<tool_response>", "</tool_response>"

_GUIDE = (
    "You can call functions. Each line between the tags describes one that you have:\n<tools>\n{tools}\n</tools>\n"
    "Where one of them helps, write the call as a JSON object between tags, once for each call:\n"
    f"{CALL_BEGIN}\n"
    '{{"name": "the function\'s name", "arguments": {{"its parameter": "a value"}}}}\n'
    f"{CALL_END}\n"
    f"What it returned comes back between {_RESULT_BEGIN} and {_RESULT_END}."
)

Content = str | list[dict[str, str]]


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """`messages`, as template_messages gave them, with tools, calls and results as plain text. New dicts where changed.

    Tools are described in the order and with the key order in which the client sent them.
    """
    result: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            wrapped = f"{_RESULT_BEGIN}\n{_text(message['content'])}\n{_RESULT_END}"
            if i and messages[i - 1]["role"] == "tool":  # results that follow each other share a user message
                result[-1] = {**result[-1], "content": _joined(result[-1]["content"], wrapped)}
            else:
                result.append({"role": "user", "content": _like(message["content"], wrapped)})
        elif "tool_calls" in message:
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
            content = message.get("content", _like(_first_content(messages), ""))
            result.append({**plain, "content": _joined(content, calls)})
        else:
            result.append(message)
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        guide = _GUIDE.format(tools=lines)
        if result and result[0]["role"] == "system":
            result[0] = {**result[0], "content": _joined(result[0].get("content", ""), guide, "\n\n")}
        else:
            result.insert(0, {"role": "system", "content": _like(_first_content(result), guide)})
    return result


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"{CALL_BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_END}"


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _first_content(messages: Sequence[dict[str, Any]]) -> Content:
    return next((message["content"] for message in messages if "content" in message), "")


def _like(content: Content, text: str) -> Content:
    if isinstance(content, str):
        return text
    return [{"type": "text", "text": text}] if text else []


def _joined(content: Content, text: str, between: str = "\n") -> Content:
    if isinstance(content, str):
        return f"{content}{between}{text}" if content else text
    return [*content, {"type": "text", "text": f"{between}{text}" if content else text}]
