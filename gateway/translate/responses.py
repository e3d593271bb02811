"""OpenAI's Responses API: the translation of one request."""

from __future__ import annotations

import secrets
import time

from engine_worker.contract.errors import ApiError
from gateway.observe.record import RequestRecord
from gateway.translate.chat import ChatAnswer, Choice, Json, encode, read_request
from gateway.translate.responses_in import ResponsesFields, chat_request, check_fields, input_items
from gateway.translate.responses_out import EventStream, ended, status_of, usage_json, whole_items
from gateway.translate.store import ResponseStore

# Fields that a response repeats from its request, and what they are when it has none.
_ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


class ResponsesTranslation:
    """One request's; `store` is the gateway's."""

    name = "responses"

    def __init__(self, store: ResponseStore) -> None:
        self.stream = False
        self.owner = ""
        self._store = store
        self._is_stored = True
        self._own_items: list[Json] = []
        self._base: Json = {}
        self._events: EventStream | None = None

    def request(self, body: bytes) -> bytes:
        data, fields = read_request(body, ResponsesFields)
        check_fields(fields)
        self.stream = bool(fields.stream)
        self._store = self._store.of(self.owner)
        self._is_stored = fields.store is not False
        self._own_items = input_items(fields)
        items = [*self._history(fields.previous_response_id), *self._own_items]
        chat = chat_request(data, fields, items, self._store.item)
        # Without references: what they name may be forgotten by the time that this turn is read again.
        self._own_items = [self._resolved(item) for item in self._own_items]
        self._base = _base(data, fields)
        return encode(chat)

    def whole(self, answer: ChatAnswer) -> bytes:
        choice = answer.choices[0] if answer.choices else Choice()
        finish_reason = choice.finish_reason or ""
        status = status_of(finish_reason)
        output = whole_items(choice, status)
        model = answer.model or self._base["model"]
        response = {**self._base, "model": model, "status": status, "output": output, "usage": usage_json(answer.usage)}
        response = ended(response, status, finish_reason)
        self._keep(response)
        return encode(response)

    def chunk(self, chunk: ChatAnswer, record: RequestRecord) -> bytes:
        if self._events is None:
            self._events = EventStream(self._base)
        return b"".join(self._events.chunk(chunk))

    def finished(self) -> bytes:
        assert self._events is not None, "a stream has a chunk before its end"
        events, response = self._events.finished()
        self._keep(response)
        return b"".join(events)

    def failed(self, error: ApiError) -> bytes:
        events = self._events or EventStream(self._base)
        return b"".join(events.failed(error))

    def raw(self, body: bytes) -> bytes | None:
        return None

    def error(self, error: ApiError, request_id: str) -> bytes:
        return error.body()

    def _history(self, response_id: str | None) -> list[Json]:
        if response_id is None:
            return []
        items = self._store.history(response_id)
        if items is None:
            raise ApiError(
                400,
                f"The response {response_id[:64]!r} is not known here (any more): send the conversation's items.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return items

    def _keep(self, response: Json) -> None:
        if self._is_stored:
            self._store.put(response, self._base["previous_response_id"], self._own_items)

    def _resolved(self, item: Json) -> Json:
        return (self._store.item(item["id"]) or item) if item.get("type") == "item_reference" else item


def _base(data: Json, fields: ResponsesFields) -> Json:
    """The response's object as it is before its output."""
    echoed = {name: data[name] if data.get(name) is not None else default for name, default in _ECHOED.items()}
    reasoning = fields.reasoning or {}
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": fields.model,
        "output": [],
        **echoed,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": fields.store is not False,
        "text": {"format": {"type": "text"}, **(fields.text or {})},
        "usage": None,
    }
