"""Chats whose beginning was cut before: block keys from there on, for the messages that are new.

A chat's next turn begins with the messages of the one before. Their digests, each over the one before it, name the
chat so far; under the digest are the keys that the messages since the last such place brought, and the ids that did
not fill a block. So a known chat costs one digest and one look-up a message, and only what is new is rendered
(turns.py), tokenized and hashed.

That takes places where a chat can be cut: the text of a later message begins with a special token before which cutting
is safe (tokenize.py), whatever stands in front. Such a token is one that no special token reaches into from the left
(`joints`). Whether the text that comes next begins so is looked at anew each time; where it doesn't, the chat is cut as
a whole.

What is kept is no text of a client's: digests, keys, fewer ids than a block has, and how the template ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from xxhash import xxh3_128_digest

from gateway.prefix.keys import ID_BYTES, KEY_BYTES, fresh_keys
from gateway.prefix.pieces import Pieces
from gateway.prefix.reading import Unknown
from gateway.prefix.turns import Turns
from policies.types import BlockKey, PrefixChain

MAX_MESSAGES: Final = 1_000
MAX_NEW: Final = 64  # messages that are learned at a time: half a millisecond without the compiled modules
MAX_ENDS: Final = 16
MAX_END_CHARS: Final = 100
MAX_BYTES: Final = 2_000_000  # to make digests of: a tenth of a millisecond
_PLACE_BYTES: Final = 300  # what a place costs beside its keys and ids: objects, the dict's share
_KEY_BYTES: Final = 56


class Place:
    """Where a chat can be cut: `keys` of the blocks that the messages from number `start` on completed, and the ids
    behind the last full block."""

    __slots__ = ("keys", "rest", "start")

    def __init__(self, start: int, keys: list[BlockKey], rest: bytes) -> None:
        self.start = start
        self.keys = keys
        self.rest = rest

    @property
    def num_bytes(self) -> int:
        return _PLACE_BYTES + _KEY_BYTES * len(self.keys) + len(self.rest)


class Places:
    """Places by digest, in two generations as keys.Strides has them; `max_bytes` bounds both (estimated)."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._young: dict[bytes, Place] = {}
        self._old: dict[bytes, Place] = {}
        self._young_bytes = 0
        self._old_bytes = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def num_bytes(self) -> int:
        return self._young_bytes + self._old_bytes

    def get(self, digest: bytes) -> Place | None:
        found = self._young.get(digest)
        if found is None and digest in self._old:
            found = self._old.pop(digest)
            self._old_bytes -= found.num_bytes
            self.put(digest, found)
        return found

    def put(self, digest: bytes, place: Place) -> None:
        num_bytes = place.num_bytes
        if num_bytes > self._half:
            return
        if self._young_bytes + num_bytes > self._half:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        before = self._young.get(digest)
        if before is not None:
            self._young_bytes -= before.num_bytes
        else:
            before = self._old.pop(digest, None)
            if before is not None:
                self._old_bytes -= before.num_bytes
        self._young[digest] = place
        self._young_bytes += num_bytes

    def check_invariants(self) -> None:
        assert self._young_bytes == sum(place.num_bytes for place in self._young.values()) <= self._half
        assert self._old_bytes == sum(place.num_bytes for place in self._old.values()) <= self._half
        assert not self._young.keys() & self._old.keys()


class KnownChats:
    """One vocabulary's chats. Used from one thread. `num_known` counts messages that were known.

    max_bytes  bound of what the places hold (estimated)
    """

    def __init__(self, turns: Turns, pieces: Pieces, max_bytes: int) -> None:
        self._turns = turns
        self._pieces = pieces
        self.places = Places(max_bytes)
        self._ends: dict[str, bytes] = {}  # ids of what comes after the messages, nearly always the same
        self.num_known = 0
        self.max_messages = MAX_MESSAGES
        self.max_new = MAX_NEW
        self.max_chat_bytes = MAX_BYTES

    def chain(
        self, messages: Sequence[Any], add_generation_prompt: bool, root: BlockKey, block_tokens: int
    ) -> PrefixChain | None:
        """The chat's chain; None where it is to be cut as a whole."""
        seed = (root ^ (2 * block_tokens + add_generation_prompt)).to_bytes(KEY_BYTES, "little")
        digests = self._digests(messages, seed)
        if digests is None:
            return None
        keys: list[BlockKey] = []
        rest, known, block_bytes = b"", 0, block_tokens * ID_BYTES
        # A last message that may be written differently for being the last has no place.
        num_lasting = len(messages) - self._turns.looks_ahead
        for i in range(num_lasting):
            place = self.places.get(digests[i])
            if place is not None and place.start == known:
                keys += place.keys
                rest, known = place.rest, i + 1
        self.num_known += known
        stop = min(len(messages), known + self.max_new)
        try:
            texts = self._turns.texts(messages, known, stop, add_generation_prompt)
        except Unknown:
            return None
        if stop < len(messages):
            texts.pop()  # the next time more will be known
        self._pieces.begin()
        start, text = known, ""  # what is not cut yet, from message `start` on
        for i, more in enumerate(texts, known):
            if i > start and more and self._pieces.begins_apart(more):
                ids = self._ids(text, start)
                if ids is None:
                    return None
                new, rest = _cut(keys[-1] if keys else root, rest + ids, block_bytes)
                keys += new
                if i <= num_lasting:
                    self.places.put(digests[i - 1], Place(start, new, rest))
                start, text = i, ""
            text += more
        ids = self._ends.get(text) if start == len(messages) else None
        if ids is None:
            ids = self._ids(text, start)
            if ids is None or stop < len(messages):
                return None
            if start == len(messages) and len(text) <= MAX_END_CHARS and len(self._ends) < MAX_ENDS:
                self._ends[text] = ids
        new, rest = _cut(keys[-1] if keys else root, rest + ids, block_bytes)
        keys += new
        num_tokens = (len(keys) * block_bytes + len(rest)) // ID_BYTES
        return PrefixChain(keys=tuple(keys), block_tokens=block_tokens, num_tokens=num_tokens)

    def _ids(self, text: str, start: int) -> bytes | None:
        """Of the text from message `start` on, which goes on with a piece of its own, or doesn't: None then."""
        if not text:
            return b""
        return self._pieces.ids(text) if start == 0 or self._pieces.begins_apart(text) else None

    def _digests(self, messages: Sequence[Any], seed: bytes) -> list[bytes] | None:
        """Of each message with all before it; None for what there is none of, or too much."""
        if not messages or len(messages) > self.max_messages:
            return None
        digests, digest, left = [], seed, self.max_chat_bytes
        for message in messages:
            if type(message) is not dict:
                return None
            content, role = message.get("content"), message.get("role")
            try:
                if len(message) == 2 and type(content) is str and type(role) is str:
                    data, kind = content.encode(), b"m" + role.encode()
                else:
                    data, kind = msgspec.json.encode(message), b"j"
            except (ValueError, OverflowError, RecursionError):  # no Unicode, a number beyond all bounds, too deep
                return None
            left -= len(data)
            if left < 0:
                return None
            digest = xxh3_128_digest(digest + xxh3_128_digest(data) + kind)
            digests.append(digest)
        return digests


def _cut(parent: BlockKey, packed: bytes, block_bytes: int) -> tuple[list[BlockKey], bytes]:
    keys = fresh_keys(parent, packed, block_bytes)
    return keys, packed[len(keys) * block_bytes :]
