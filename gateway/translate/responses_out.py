"""The answer half of the Responses API: output items, whole or as the stream's events.

A stream opens items one after another, each with its own id and place; events are numbered through. Parallel function
calls arrive by index, and a call that has been closed is not opened again.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from engine_worker.contract.errors import ApiError
from gateway.openai.sse import SseError
from gateway.translate.chat import ChatAnswer, ChatUsage, Choice, Json, Message, ToolCall, event

_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(slots=True)
class Item:
    """One output item as it grows. `text` is its text, its reasoning or its arguments."""

    kind: str
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    call: ToolCall | None = None
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{_PREFIX[self.kind]}_{secrets.token_hex(16)}"

    def part(self) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": "".join(self.text)}
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": self.logprobs}

    def json(self, status: str) -> Json:
        if self.kind == "function_call":
            assert self.call is not None
            call_id = self.call.id or f"call_{secrets.token_hex(12)}"
            head = {"type": "function_call", "id": self.id, "call_id": call_id, "name": self.call.function.name or ""}
            return {**head, "arguments": "".join(self.text), "status": status}
        content = [self.part()] if self.text or status != "in_progress" else []
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content}


def whole_items(choice: Choice, status: str) -> list[Json]:
    message = choice.message
    items: list[Item] = []
    if message.thought:
        items.append(Item("reasoning", [message.thought]))
    calls = message.tool_calls or []
    if message.text or not calls:
        items.append(Item("message", [message.text], logprobs_of(choice)))
    items += [Item("function_call", [call.function.arguments or ""], call=call) for call in calls]
    return [item.json(status) for item in items]


def logprobs_of(choice: Choice) -> list[Json]:
    return (choice.logprobs.content or []) if choice.logprobs is not None else []


def usage_json(usage: ChatUsage | None) -> Json | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class EventStream:
    """From chat chunks to events. `base` is the response's object without output and usage."""

    def __init__(self, base: Json) -> None:
        self._base = base
        self._sequence = 0
        self._items: list[Json] = []  # those that are complete
        self._open: Item | None = None
        self._call_index = -1
        self._finish_reason = ""
        self._usage: ChatUsage | None = None

    def chunk(self, chunk: ChatAnswer) -> list[bytes]:
        """Raises SseError."""
        out: list[bytes] = []
        if self._sequence == 0:
            self._base["model"] = chunk.model or self._base["model"]
            out.append(self._event("response.created", response=self._response("in_progress")))
            out.append(self._event("response.in_progress", response=self._response("in_progress")))
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices[:1]:
            out += self._delta(choice.delta, logprobs_of(choice))
            self._finish_reason = choice.finish_reason or self._finish_reason
        return out

    def finished(self) -> tuple[list[bytes], Json]:
        """The last events and the complete response."""
        status = status_of(self._finish_reason)
        out: list[bytes] = []
        if not self._items and self._open is None:
            out += self._enter(Item("message"))
        out += self._close(status)
        response = self._response(status)
        return [*out, self._event(f"response.{status}", response=response)], response

    def failed(self, error: ApiError) -> list[bytes]:
        """Clients differ in what they look at: the event's name, its flat fields, or an error object in it."""
        fields = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        return [self._event("error", code=error.code, message=error.message, param=error.param, error=fields)]

    def _response(self, status: str) -> Json:
        response = {**self._base, "status": status, "output": list(self._items), "usage": usage_json(self._usage)}
        return response if status == "in_progress" else ended(response, status, self._finish_reason)

    def _delta(self, delta: Message, logprobs: list[Json]) -> list[bytes]:
        out: list[bytes] = []
        if delta.thought:
            out += self._grow("reasoning", "reasoning_text", delta.thought)
        if delta.text:
            out += self._grow("message", "output_text", delta.text, logprobs)
        for call in delta.tool_calls or ():
            out += self._call(call)
        return out

    def _grow(self, kind: str, part: str, text: str, logprobs: list[Json] | None = None) -> list[bytes]:
        out: list[bytes] = []
        if self._open is None or self._open.kind != kind:
            out += self._enter(Item(kind))
        assert self._open is not None
        self._open.text.append(text)
        more = {} if logprobs is None else {"logprobs": logprobs}
        self._open.logprobs += logprobs or []
        return [*out, self._event(f"response.{part}.delta", **self._place(), content_index=0, delta=text, **more)]

    def _call(self, call: ToolCall) -> list[bytes]:
        out: list[bytes] = []
        index = call.index if call.index is not None else self._call_index + 1
        if index > self._call_index:
            self._call_index = index
            out += self._enter(Item("function_call", call=call))
        if call.function.arguments:
            if index < self._call_index or self._open is None or self._open.kind != "function_call":
                raise SseError("the replica went back to a function call that it had ended")
            self._open.text.append(call.function.arguments)
            name = "response.function_call_arguments.delta"
            out.append(self._event(name, **self._place(), delta=call.function.arguments))
        return out

    def _enter(self, item: Item) -> list[bytes]:
        out = self._close("completed")
        if item.call is not None and not item.call.id:
            item.call = ToolCall(id=f"call_{secrets.token_hex(12)}", function=item.call.function)
        self._open = item
        place = {"output_index": len(self._items)}
        out.append(self._event("response.output_item.added", **place, item=item.json("in_progress")))
        if item.kind != "function_call":
            part = item.part()
            out.append(self._event("response.content_part.added", **self._place(), content_index=0, part=part))
        return out

    def _close(self, status: str) -> list[bytes]:
        item = self._open
        if item is None:
            return []
        place, text = self._place(), "".join(item.text)
        if item.kind == "function_call":
            assert item.call is not None
            name = item.call.function.name or ""
            out = [self._event("response.function_call_arguments.done", **place, name=name, arguments=text)]
        else:
            kind, more = (
                ("reasoning_text", {}) if item.kind == "reasoning" else ("output_text", {"logprobs": item.logprobs})
            )
            out = [
                self._event(f"response.{kind}.done", **place, content_index=0, text=text, **more),
                self._event("response.content_part.done", **place, content_index=0, part=item.part()),
            ]
        done = item.json(status)
        out.append(self._event("response.output_item.done", output_index=place["output_index"], item=done))
        self._items.append(done)
        self._open = None
        return out

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self._items)}

    def _event(self, kind: str, **fields: object) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(kind, data)


def status_of(finish_reason: str) -> str:
    return "incomplete" if finish_reason in ("length", "content_filter") else "completed"


def ended(response: Json, status: str, finish_reason: str) -> Json:
    """What a response that has come to its end says besides."""
    if status == "incomplete":
        reason = "content_filter" if finish_reason == "content_filter" else "max_output_tokens"
        return {**response, "incomplete_details": {"reason": reason}}
    return {**response, "completed_at": int(time.time())}
