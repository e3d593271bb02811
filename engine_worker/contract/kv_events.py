"""KV cache events on the wire, as vLLM publishes them, so that either side may be vLLM or a tool made for it.

A publisher sends batches over a ZMQ PUB socket, each a message of three frames: topic, sequence number (u64 big-endian,
from 0 in each life of the engine) and a msgpack payload. What a subscriber missed it asks of a ROUTER socket: one frame
holding the sequence number to start from; the answers carry the same frames, and the last one the sequence number -1
and an empty payload.

The payload is `[timestamp, [event, ...], data parallel rank]`. Three encodings are in use, and all are read here:
events as arrays with the type's name first (until mid-2026), events as maps with a "type" in an array batch (since
then; this is what we write), and maps throughout. Fields that we do not know are skipped, so the next version reads,
too.

Block hashes are opaque: integers or bytes. To know what a block holds, follow `token_ids` and the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

EngineHash = int | bytes

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

MEDIUM_DEVICE = "GPU"  # vLLM's word for the memory that the engine computes in, whatever the device is


class WireError(ValueError):
    """Bytes that are no KV event batch."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive full blocks became reusable behind `parent_block_hash` (None: behind nothing).

    token_ids   block_size ids for each hash, in order
    extra_keys  for each block what else its hash covers, in vLLM's order: the adapter's name, multimodal parts (not
                strings), the cache salt (first block only), prompt embeddings (not strings). None for nothing
    group_idx, kv_cache_spec_kind
                which of a hybrid model's caches; None where there is one
    """

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`timestamp` is the publisher's wall clock. `num_unknown` events were of types that we do not know."""

    timestamp: float
    events: tuple[WireEvent, ...]
    data_parallel_rank: int | None = None
    num_unknown: int = 0


_EVENT_TYPES: dict[str, type[WireEvent]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_FIELDS = {name: msgspec.structs.fields(kind) for name, kind in _EVENT_TYPES.items()}
_decoder = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()


def encode_batch(timestamp: float, events: Iterable[WireEvent], data_parallel_rank: int | None = None) -> bytes:
    """A payload: an array batch of events as maps."""
    return _encoder.encode([timestamp, [_event_map(event) for event in events], data_parallel_rank])


def _event_map(event: WireEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    # The fields that vLLM always sends are sent even when null; the later ones only when set.
    optional = ("extra_keys", "group_idx", "kv_cache_spec_kind")
    kept = {name: value for name, value in fields.items() if value is not None or name not in optional}
    return {"type": type(event).__name__, **kept}


def decode_batch(payload: bytes) -> EventBatch:
    """Read any of the encodings. Raises WireError."""
    try:
        raw = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"the payload is not msgpack: {error}") from error
    if isinstance(raw, dict):
        timestamp, raw_events, rank = raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank")
    elif isinstance(raw, list) and len(raw) >= 2:
        timestamp, raw_events, rank = raw[0], raw[1], raw[2] if len(raw) > 2 else None
    else:
        raise WireError("the payload is no event batch")
    if not isinstance(timestamp, float | int) or not isinstance(raw_events, list):
        raise WireError("the payload is no event batch")
    decoded = [_decode_event(raw_event) for raw_event in raw_events]
    events = tuple(event for event in decoded if event is not None)
    return EventBatch(
        timestamp=float(timestamp),
        events=events,
        data_parallel_rank=rank if isinstance(rank, int) else None,
        num_unknown=len(decoded) - len(events),
    )


def _decode_event(raw: Any) -> WireEvent | None:
    """None for a type that we do not know."""
    if isinstance(raw, dict):
        name, values = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        name, values = raw[0], _named(raw)
    else:
        raise WireError("an event is neither an array nor a map")
    kind = _EVENT_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    try:
        event = msgspec.convert({key: value for key, value in values.items() if key != "type"}, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise WireError(f"a {name} event is malformed: {error}") from error
    if isinstance(event, BlockStored):
        _check_stored(event)
    return event


def _named(raw: Sequence[Any]) -> dict[str, Any]:
    """An array event's fields by name. Ours are declared in vLLM's order; it only ever added at the end."""
    fields = _FIELDS.get(raw[0], ()) if isinstance(raw[0], str) else ()
    return {field.name: value for field, value in zip(fields, raw[1:], strict=False)}


def _check_stored(event: BlockStored) -> None:
    if event.block_size <= 0 or len(event.token_ids) != event.block_size * len(event.block_hashes):
        raise WireError(
            f"a BlockStored event has {len(event.token_ids)} token ids for {len(event.block_hashes)} blocks "
            f"of {event.block_size}"
        )
    if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
        raise WireError("a BlockStored event's extra_keys do not match its blocks")
    if event.token_ids and not 0 <= min(event.token_ids) <= max(event.token_ids) < 2**32:
        raise WireError("a BlockStored event has token ids that are none")


def encode_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def decode_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Sequence number and payload of a message; -1 ends a replay. The topic and delimiters before them vary."""
    if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
        raise WireError("a message has no sequence number")
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
