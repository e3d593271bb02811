"""Answers kept for later turns: `previous_response_id`, and item references, which some clients send by default.

A stored answer has its own items and the id of the answer before it, so a conversation of n turns takes the room of its
items once. The least recently used go first when the store is full; a chain with a lost link is refused, never cut
short. Ids are random and not to be guessed. With API keys every answer has its tenant as owner besides, and `of` shows
each only what is its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
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
    owner: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response) + 512


@dataclass(slots=True)
class _Kept:
    """What all views of a store have in common. `items`: an item's id -> its response's."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    items: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """At most `max_bytes` of answers, in memory. 0 keeps none. Sees those of `owner`."""

    def __init__(self, max_bytes: int, owner: str = "", kept: _Kept | None = None) -> None:
        self._max_bytes = max_bytes
        self._owner = owner
        self._kept = kept or _Kept()

    def of(self, owner: str) -> ResponseStore:
        """The same store as `owner` sees it."""
        return self if owner == self._owner else ResponseStore(self._max_bytes, owner, self._kept)

    def put(self, response: Json, previous_id: str | None, own_items: list[Json]) -> None:
        """Keep an answer that is complete. Its id must be new."""
        response_id: str = response["id"]
        assert response_id not in self._kept.responses
        items = [*own_items, *response["output"]]
        item_ids = tuple(item["id"] for item in response["output"] if "id" in item)
        stored = StoredResponse(previous_id, encode(items), encode(response), item_ids, self._owner)
        if stored.num_bytes > self._max_bytes:
            return
        self._kept.responses[response_id] = stored
        self._kept.num_bytes += stored.num_bytes
        self._kept.items.update(dict.fromkeys(item_ids, response_id))
        while self._kept.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept.responses)))

    def get(self, response_id: str) -> bytes | None:
        """The answer's object."""
        stored = self._touch(response_id)
        return None if stored is None else stored.response

    def delete(self, response_id: str) -> bool:
        if self._touch(response_id) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        stored = self._kept.responses.pop(response_id)
        self._kept.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            del self._kept.items[item_id]

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
        stored = self._touch(self._kept.items.get(item_id, ""))
        if stored is None:
            return None
        items: list[dict[str, Any]] = msgspec.json.decode(stored.items)
        return next(item for item in items if item.get("id") == item_id)

    def _touch(self, response_id: str) -> StoredResponse | None:
        stored = self._kept.responses.get(response_id)
        if stored is not None and stored.owner != self._owner:
            return None
        if stored is not None:
            self._kept.responses.move_to_end(response_id)
        return stored

    def check_invariants(self) -> None:
        assert (
            self._kept.num_bytes == sum(stored.num_bytes for stored in self._kept.responses.values()) <= self._max_bytes
        )
        assert set(self._kept.items.values()) <= set(self._kept.responses)
        assert len(self._kept.items) == sum(len(stored.item_ids) for stored in self._kept.responses.values())
