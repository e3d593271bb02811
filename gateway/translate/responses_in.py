"""OpenAI's Responses request to a chat request.

Items become messages: what the assistant did in one turn (reasoning, text, function calls, each an item) is one
message of a chat, so the items of a turn are gathered until something else comes. Tools that only OpenAI's own servers
carry out are left out; what would change where the answer comes from (`background`, `conversation`) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec

from engine_worker.contract.errors import ApiError
from gateway.openai.fields import PositiveInt
from gateway.translate.chat import Json, obj, parts_or_text, string, unsupported, wrong

Resolve = Callable[[str], Json | None]  # a stored item by its id

# Fields that mean something else, or nothing, in a chat request. All others pass as they are, as vLLM's do.
_OWN = frozenset(
    {"input", "instructions", "text", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "max_output_tokens"}
    | {"stream", "stream_options", "store", "metadata", "include", "truncation", "background", "conversation", "prompt"}
    | {"previous_response_id", "max_tool_calls", "top_logprobs", "service_tier", "safety_identifier", "model"}
    | {"prompt_cache_options", "prompt_cache_retention", "context_management", "moderation", "access_programs"}
)
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ResponsesFields(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    input: str | list[Json] | None = None
    instructions: str | list[Json] | None = None
    max_output_tokens: PositiveInt | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


def check_fields(fields: ResponsesFields) -> None:
    """Raises ApiError(400) for what can't be honoured."""
    if fields.background:
        raise unsupported("background", "`background` is not supported here: wait for the answer, or stream it.")
    if fields.conversation is not None:
        raise unsupported(
            "conversation", "`conversation` is not supported here: send the items, or the last answer's id."
        )
    if fields.prompt is not None:
        raise unsupported(
            "prompt", "`prompt` (a stored template) is not supported here: send `instructions` and `input`."
        )


def input_items(fields: ResponsesFields) -> list[Json]:
    """This request's own items."""
    if fields.input is None:
        raise ApiError(400, "You must provide the parameter 'input'.", param="input")
    if isinstance(fields.input, str):
        return [{"type": "message", "role": "user", "content": fields.input}]
    if not fields.input:
        raise wrong("input", "expected at least one item")
    return fields.input


def chat_request(data: Json, fields: ResponsesFields, items: Iterable[Json], resolve: Resolve) -> Json:
    """The chat request for `items` (those of earlier turns first). Raises ApiError(400)."""
    chat: Json = {"model": fields.model, "messages": [*_instructions(fields), *_messages(items, resolve)]}
    tools = _tools(fields.tools)
    if tools:
        chat["tools"] = tools
        chat |= _tool_choice(fields.tool_choice, tools)
        if fields.parallel_tool_calls is not None:
            chat["parallel_tool_calls"] = fields.parallel_tool_calls
    if fields.max_output_tokens is not None:
        chat["max_completion_tokens"] = fields.max_output_tokens
    if isinstance(effort := (fields.reasoning or {}).get("effort"), str):
        chat["reasoning_effort"] = effort
    if (wanted := _format((fields.text or {}).get("format"))) is not None:
        chat["response_format"] = wanted
    if fields.top_logprobs or "message.output_text.logprobs" in (fields.include or ()):
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    chat |= {name: value for name, value in data.items() if name not in _OWN and value is not None}
    if fields.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def _instructions(fields: ResponsesFields) -> list[Json]:
    if isinstance(fields.instructions, list):
        return _messages(fields.instructions, lambda item_id: None)
    return [{"role": "system", "content": fields.instructions}] if fields.instructions else []


def _messages(items: Iterable[Json], resolve: Resolve) -> list[Json]:
    turns = _Turns()
    for i, item in enumerate(items):
        if item.get("type") == "item_reference":
            item = _referenced(item, resolve, f"input[{i}]")
        turns.add(item, f"input[{i}]")
    return turns.messages()


def _referenced(item: Json, resolve: Resolve, where: str) -> Json:
    item_id = string(item.get("id"), f"{where}.id")
    found = resolve(item_id)
    if found is None:
        raise ApiError(
            400,
            f"Item {item_id[:64]!r} is not known here (any more): send the item itself. Set `store` to false to have "
            "your client do so.",
            param=f"{where}.id",
        )
    return found


class _Turns:
    """Gathers the assistant's items into messages."""

    def __init__(self) -> None:
        self._done: list[Json] = []
        self._open: Json = {}  # the assistant's message that still grows

    def messages(self) -> list[Json]:
        self._close()
        return self._done

    def add(self, item: Json, where: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._close()
                call_id = string(item.get("call_id"), f"{where}.call_id")
                content = _content(item.get("output"), f"{where}.output")
                self._done.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                raise unsupported(where, f"Input items of type {kind!r} are not supported here.")

    def _close(self) -> None:
        if self._open:
            thought = self._open.pop("reasoning_content", None)
            message = {"role": "assistant", "content": None, **self._open}
            if thought:
                message["reasoning_content"] = thought
            self._done.append(message)
            self._open = {}

    def _message(self, item: Json, where: str) -> None:
        role = string(item.get("role"), f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._close()
            self._done.append({"role": role, "content": content})
            return
        if "content" in self._open or "tool_calls" in self._open:
            self._close()
        self._open["content"] = content

    def _reasoning(self, item: Json) -> None:
        if "content" in self._open or "tool_calls" in self._open:
            self._close()
        parts = item.get("content") or item.get("summary")
        if not isinstance(parts, list):
            return
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            self._open["reasoning_content"] = "\n".join(texts)

    def _call(self, item: Json, where: str) -> None:
        function = {
            "name": string(item.get("name"), f"{where}.name"),
            "arguments": string(item.get("arguments"), f"{where}.arguments"),
        }
        call = {"id": string(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": function}
        self._open.setdefault("tool_calls", []).append(call)


def _content(content: Any, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "expected a string or a list of parts")
    return parts_or_text([_part(obj(part, f"{where}[{i}]"), f"{where}[{i}]") for i, part in enumerate(content)])


def _part(part: Json, where: str) -> Json:
    kind = part.get("type")
    if isinstance(kind, str) and (name := _TEXT_PARTS.get(kind)):
        return {"type": "text", "text": string(part.get(name), f"{where}.{name}")}
    if kind == "input_image" and part.get("image_url") is not None:
        image: Json = {"url": string(part["image_url"], f"{where}.image_url")}
        if isinstance(part.get("detail"), str):
            image["detail"] = part["detail"]
        return {"type": "image_url", "image_url": image}
    raise unsupported(where, f"Parts of type {kind!r} are not supported here; send `input_text` parts.")


def _tools(tools: list[Json] | None) -> list[Json]:
    found = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            continue
        string(tool.get("name"), f"tools[{i}].name")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: str | Json | None, tools: list[Json]) -> Json:
    if choice is None:
        return {}
    if isinstance(choice, str):
        return {"tool_choice": choice}
    if choice.get("type") == "function":
        name = string(choice.get("name"), "tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": name}}}
    if choice.get("type") == "allowed_tools":
        return {"tool_choice": string(choice.get("mode"), "tool_choice.mode")}
    return {}  # a tool of OpenAI's own, which was left out


def _format(wanted: Any) -> Json | None:
    if wanted is None:
        return None
    wanted = obj(wanted, "text.format")
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
            return {"type": "json_schema", "json_schema": schema}
    raise wrong("text.format.type", "expected text, json_object or json_schema")
