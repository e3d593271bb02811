"""A replica's KV events to the router's: engine hashes in, our own block keys out.

An engine's hashes mean nothing outside it, so a block's key is computed from its token ids and its parent's key, and
the hash is remembered to understand later events. A block whose parent is not known can't be keyed: events were missed,
and guessing would put false keys into the index. Such a block is left out, and the translation says what it lacks.

One block may be held in several places (device and offload tiers, cache groups of a hybrid model), and different hashes
may hold the same tokens. The router hears of a key when its first holder appears and when its last one goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_worker.contract import kv_events as wire
from gateway.prefix.keys import ID_BYTES, block_keys, pack_ids, token_root
from gateway.prefix.service import Space
from policies.events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from policies.types import BlockKey, ReplicaId

# Caches that a prefix hit needs from its first block on. The others keep a window or a state.
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})

Place = tuple[str, int]  # medium, cache group


@dataclass(frozen=True, slots=True)
class Translation:
    """A batch in the router's terms, in order. `lacking` is a sentence where a part of it could not be understood."""

    events: tuple[Event, ...]
    lacking: str | None = None


class KvEventTranslator:
    """One replica's. Remembers at most `max_blocks` engine hashes; past that the oldest count as removed."""

    def __init__(self, replica_id: ReplicaId, space: Space, *, max_blocks: int = 262_144) -> None:
        assert space.tokenizer, "a replica in text mode has no key for a token block"
        assert max_blocks > 0
        self._replica_id = replica_id
        self._space = space
        self._max_blocks = max_blocks
        self._places: dict[Place, dict[wire.EngineHash, BlockKey | None]] = {}  # None: a block that can't be keyed
        self._num_holders: dict[BlockKey, int] = {}
        self._num_blocks = 0
        self._ignored_groups: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Engine hashes remembered."""
        return self._num_blocks

    def clear(self) -> None:
        """Forget everything: the engine restarted or cleared its cache."""
        self._places.clear()
        self._num_holders.clear()
        self._ignored_groups.clear()
        self._num_blocks = 0

    def translate(self, batch: wire.EventBatch, at: float) -> Translation:
        """`at` is the router's clock, in seconds."""
        events: list[Event] = []
        lacking: str | None = None
        for event in batch.events:
            match event:
                case wire.BlockStored():
                    lacking = self._stored(event, at, events) or lacking
                case wire.BlockRemoved():
                    self._removed(event, at, events)
                case wire.AllBlocksCleared():
                    self.clear()
                    lacking = None
                    events.append(BlocksCleared(at=at, replica_id=self._replica_id))
        return Translation(tuple(events), lacking)

    def _stored(self, event: wire.BlockStored, at: float, events: list[Event]) -> str | None:
        if event.kv_cache_spec_kind not in _PREFIX_KINDS:
            self._ignored_groups.add(event.group_idx or 0)
            return None
        if event.block_size != self._space.block_tokens:
            return (
                f"its blocks have {event.block_size} tokens, not the {self._space.block_tokens} it was registered with"
            )
        place = (event.medium or wire.MEDIUM_DEVICE, event.group_idx or 0)
        keys = self._keys(event, place)
        if keys is None:
            return "a block's parent is not known"
        known = self._places.setdefault(place, {})
        fresh: list[BlockKey] = []
        for engine_hash, key in zip(event.block_hashes, keys, strict=True):
            if engine_hash in known:
                continue
            known[engine_hash] = key
            self._num_blocks += 1
            if key is not None and self._hold(key):
                fresh.append(key)
        if fresh:
            events.append(BlocksStored(at=at, replica_id=self._replica_id, keys=tuple(fresh)))
        self._forget_oldest(known, at, events)
        return None

    def _keys(self, event: wire.BlockStored, place: Place) -> list[BlockKey | None] | None:
        """A key for each block of the event, None for one that has none; None in all where the parent is not known."""
        parent: BlockKey | None
        if event.parent_block_hash is None:
            parent = self._root(event)
        else:
            holder = next((known for known in self._nearest(place) if event.parent_block_hash in known), None)
            if holder is None:
                return None
            parent = holder[event.parent_block_hash]
        if parent is None:
            return [None] * len(event.block_hashes)
        num_plain = _num_plain(event)
        size = self._space.block_tokens
        data = pack_ids(event.token_ids[: num_plain * size])
        keys: list[BlockKey | None] = list(block_keys(parent, data, size * ID_BYTES))
        return [*keys, *[None] * (len(event.block_hashes) - num_plain)]

    def _root(self, event: wire.BlockStored) -> BlockKey:
        strings = _text_extras(event, 0)
        salt = strings[0] if len(strings) == 1 else ""
        return token_root(self._space.model, self._space.tokenizer, event.lora_name or "", salt)

    def _nearest(self, place: Place) -> Iterable[dict[wire.EngineHash, BlockKey | None]]:
        yield self._places.get(place, {})
        yield from (known for other, known in self._places.items() if other != place)

    def _removed(self, event: wire.BlockRemoved, at: float, events: list[Event]) -> None:
        if event.group_idx is not None and event.group_idx in self._ignored_groups:
            return
        known = self._places.get((event.medium or wire.MEDIUM_DEVICE, event.group_idx or 0), {})
        gone: list[BlockKey] = []
        for engine_hash in event.block_hashes:
            if engine_hash in known:  # else it was stored before we listened
                self._let_go(known.pop(engine_hash), gone)
        if gone:
            events.append(BlocksRemoved(at=at, replica_id=self._replica_id, keys=tuple(gone)))

    def _forget_oldest(self, known: dict[wire.EngineHash, BlockKey | None], at: float, events: list[Event]) -> None:
        gone: list[BlockKey] = []
        while self._num_blocks > self._max_blocks:
            self._let_go(known.pop(next(iter(known))), gone)
        if gone:
            events.append(BlocksRemoved(at=at, replica_id=self._replica_id, keys=tuple(gone)))

    def _hold(self, key: BlockKey) -> bool:
        """One more holder of `key`. True for the first."""
        num_holders = self._num_holders.get(key, 0)
        self._num_holders[key] = num_holders + 1
        return num_holders == 0

    def _let_go(self, key: BlockKey | None, gone: list[BlockKey]) -> None:
        """One hash less; `gone` gets its key when that was the last holder."""
        self._num_blocks -= 1
        if key is None:
            return
        self._num_holders[key] -= 1
        if self._num_holders[key] == 0:
            del self._num_holders[key]
            gone.append(key)

    def check_invariants(self) -> None:
        held = [key for known in self._places.values() for key in known.values()]
        assert len(held) == self._num_blocks <= self._max_blocks
        counts: dict[BlockKey, int] = {}
        for key in held:
            if key is not None:
                counts[key] = counts.get(key, 0) + 1
        assert counts == self._num_holders


def _num_plain(event: wire.BlockStored) -> int:
    """Leading blocks that token ids, adapter and salt describe fully (an image's blocks hold only placeholders)."""
    for i in range(len(event.block_hashes)):
        extras = event.extra_keys[i] if event.extra_keys is not None else None
        num_others = len(extras or ()) - (1 if event.lora_name in (extras or ()) else 0)
        allowed = 1 if i == 0 and event.parent_block_hash is None else 0
        if num_others != len(_text_extras(event, i)) or num_others > allowed:
            return i
    return len(event.block_hashes)


def _text_extras(event: wire.BlockStored, i: int) -> list[str]:
    """A block's extra keys that are strings, without the adapter's name: the salt, if anything."""
    extras = event.extra_keys[i] if event.extra_keys else None
    strings = [extra for extra in extras or () if isinstance(extra, str)]
    if event.lora_name in strings:
        strings.remove(event.lora_name)
    return strings
