"""Anthropic's Messages request to a chat request.

What makes prompts of one conversation differ from turn to turn, and is not the conversation, is dropped: marks called
`cache_control`, and the system block with a billing header that one client writes anew into each request. Thinking
comes back to the model as `reasoning_content`, which chat templates know how to treat.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from gateway.openai.fields import PositiveInt
from gateway.translate.chat import Json, obj, parts_or_text, read_request, string, unsupported, wrong

_BILLING = "x-anthropic-billing-header"
# Chat's own names, and other engines' sampling fields, pass as they are.
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "cache_salt", "chat_template_kwargs", "prompt_cache_key")
_EFFORT = {"xhigh": "high", "max": "high"}


class MessagesFields(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    messages: Annotated[list[Json], msgspec.Meta(min_length=1)]
    max_tokens: PositiveInt | None = None
    system: str | list[Json] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None


def read_messages(body: bytes, needs_max_tokens: bool = True) -> tuple[Json, MessagesFields]:
    """Raises ApiError(400)."""
    data, fields = read_request(body, MessagesFields)
    if needs_max_tokens and fields.max_tokens is None:
        raise wrong("max_tokens", "it is required")
    return data, fields


def chat_request(data: Json, fields: MessagesFields) -> Json:
    """The chat request. Raises ApiError(400)."""
    messages = [*_system(fields.system)]
    for i, message in enumerate(fields.messages):
        messages += _message(message, f"messages.{i}")
    chat: Json = {"model": fields.model, "messages": messages}
    if tools := _tools(fields.tools):
        chat["tools"] = tools
        chat |= _tool_choice(fields.tool_choice)
    if fields.max_tokens is not None:
        chat["max_tokens"] = fields.max_tokens
    if fields.stop_sequences:
        chat["stop"] = fields.stop_sequences
    chat |= {name: data[name] for name in _SAME if data.get(name) is not None}
    chat |= _thinking(fields, chat.get("chat_template_kwargs"))
    chat |= _output(fields)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if fields.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def _system(system: str | list[Json] | None) -> list[Json]:
    if system is None:
        return []
    if isinstance(system, str):
        blocks = [system]
    else:
        blocks = [string(block.get("text"), f"system.{i}.text") for i, block in enumerate(system)]
    text = "\n".join(block for block in blocks if not block.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _message(message: Json, where: str) -> list[Json]:
    role = string(message.get("role"), f"{where}.role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "expected a string or a list of blocks")
    blocks = [obj(block, f"{where}.content.{i}") for i, block in enumerate(content)]
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content")]
    return _user(role, blocks, f"{where}.content")


def _user(role: str, blocks: list[Json], where: str) -> list[Json]:
    """Tool results become messages of their own, in front of what the user says."""
    results: list[Json] = []
    parts: list[Json] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            call_id = string(block.get("tool_use_id"), f"{where}.{i}.tool_use_id")
            content = _result(block.get("content"), f"{where}.{i}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            parts.append(_part(block, f"{where}.{i}"))
    if parts or not results:
        results.append({"role": role, "content": parts_or_text(parts)})
    return results


def _result(content: Any, where: str) -> str | list[Json]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "expected a string or a list of blocks")
    return parts_or_text([_part(obj(block, f"{where}.{i}"), f"{where}.{i}") for i, block in enumerate(content)])


def _part(block: Json, where: str) -> Json:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": string(block.get("text"), f"{where}.text")}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block.get("source"), f"{where}.source")}}
    if kind == "document":
        source = obj(block.get("source"), f"{where}.source")
        if source.get("type") == "text":
            return {"type": "text", "text": string(source.get("data"), f"{where}.source.data")}
    raise unsupported(where, f"Blocks of type {kind!r} are not supported here; send text, image or tool blocks.")


def _image_url(source: Any, where: str) -> str:
    source = obj(source, where)
    if source.get("type") == "url":
        return string(source.get("url"), f"{where}.url")
    data = string(source.get("data"), f"{where}.data")
    return f"data:{string(source.get('media_type'), f'{where}.media_type')};base64,{data}"


def _assistant(blocks: list[Json], where: str) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for i, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(string(block.get("text"), f"{where}.{i}.text"))
            case "thinking":
                thoughts.append(string(block.get("thinking"), f"{where}.{i}.thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, f"{where}.{i}"))
            case kind:
                raise unsupported(f"{where}.{i}", f"Blocks of type {kind!r} are not supported here.")
    text = "\n".join(texts)
    message: Json = {"role": "assistant", "content": text if text or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Json, where: str) -> Json:
    arguments = json.dumps(obj(block.get("input", {}), f"{where}.input"), ensure_ascii=False)
    function = {"name": string(block.get("name"), f"{where}.name"), "arguments": arguments}
    return {"id": string(block.get("id"), f"{where}.id"), "type": "function", "function": function}


def _tools(tools: list[Json] | None) -> list[Json]:
    """Tools that Anthropic's own servers carry out (they have another `type`) are left out, as no one here can."""
    found = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") not in (None, "custom"):
            continue
        function: Json = {"name": string(tool.get("name"), f"tools.{i}.name")}
        if tool.get("description"):
            function["description"] = tool["description"]
        function["parameters"] = obj(tool.get("input_schema"), f"tools.{i}.input_schema")
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: Json | None) -> Json:
    if choice is None:
        return {}
    more: Json = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    match choice.get("type"):
        case "auto":
            return {"tool_choice": "auto", **more}
        case "any":
            return {"tool_choice": "required", **more}
        case "none":
            return {"tool_choice": "none"}
        case "tool":
            name = string(choice.get("name"), "tool_choice.name")
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **more}
    raise wrong("tool_choice.type", "expected auto, any, tool or none")


def _thinking(fields: MessagesFields, kwargs: Any) -> Json:
    """Whether to think is the chat template's switch, where the request has an opinion."""
    kind = (fields.thinking or {}).get("type")
    if kind is None or (kwargs is not None and (not isinstance(kwargs, dict) or "enable_thinking" in kwargs)):
        return {}
    return {"chat_template_kwargs": {**(kwargs or {}), "enable_thinking": kind != "disabled"}}


def _output(fields: MessagesFields) -> Json:
    config = fields.output_config or {}
    result: Json = {}
    if isinstance(effort := config.get("effort"), str):
        result["reasoning_effort"] = _EFFORT.get(effort, effort)
    wanted = config.get("format") or fields.output_format
    if wanted is not None:
        wanted = obj(wanted, "output_config.format")
        if wanted.get("type") != "json_schema":
            raise wrong("output_config.format.type", "expected json_schema")
        schema = obj(wanted.get("schema"), "output_config.format.schema")
        schema_format = {"name": "output", "schema": schema, "strict": True}
        result["response_format"] = {"type": "json_schema", "json_schema": schema_format}
    return result
