"""Answers kept for later turns: `previous_response_id`, and item references, which some clients send by default.

A stored answer has its own items and the id of the answer before it, so a conversation of n turns takes the room of its
items once. The least recently used go first when the store is full; a chain with a lost link is refused, never cut
short. Ids are random and not to be guessed: whoever has one got it with the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.translate.chat import Json, encode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`items` are the request's own ones and the answer's, `response` the answer's object, all as JSON."""

    previous_id: str | None
    items: bytes
    response: bytes
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response) + 512


class ResponseStore:
    """At most `max_bytes` of answers, in memory. 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, str] = {}  # an item's id -> its response's

    def put(self, response: Json, previous_id: str | None, own_items: list[Json]) -> None:
        """Keep an answer that is complete. Its id must be new."""
        response_id: str = response["id"]
        assert response_id not in self._responses
        items = [*own_items, *response["output"]]
        item_ids = tuple(item["id"] for item in response["output"] if "id" in item)
        stored = StoredResponse(previous_id, encode(items), encode(response), item_ids)
        if stored.num_bytes > self._max_bytes:
            return
        self._responses[response_id] = stored
        self._num_bytes += stored.num_bytes
        self._items.update(dict.fromkeys(item_ids, response_id))
        while self._num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, response_id: str) -> bytes | None:
        """The answer's object."""
        stored = self._touch(response_id)
        return None if stored is None else stored.response

    def delete(self, response_id: str) -> bool:
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self._num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            del self._items[item_id]
        return True

    def history(self, response_id: str) -> list[Json] | None:
        """The items of a conversation up to and with that answer; None where a link is not known (any more)."""
        turns: list[list[Json]] = []
        next_id: str | None = response_id
        while next_id is not None:
            stored = self._touch(next_id)
            if stored is None:
                return None
            turns.append(msgspec.json.decode(stored.items))
            next_id = stored.previous_id
        return [item for turn in reversed(turns) for item in turn]

    def item(self, item_id: str) -> Json | None:
        """An item of a stored answer's output."""
        stored = self._touch(self._items.get(item_id, ""))
        if stored is None:
            return None
        items: list[dict[str, Any]] = msgspec.json.decode(stored.items)
        return next(item for item in items if item.get("id") == item_id)

    def _touch(self, response_id: str) -> StoredResponse | None:
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def check_invariants(self) -> None:
        assert self._num_bytes == sum(stored.num_bytes for stored in self._responses.values()) <= self._max_bytes
        assert set(self._items.values()) <= set(self._responses)
        assert len(self._items) == sum(len(stored.item_ids) for stored in self._responses.values())
