"""What gateways tell each other: messages in msgpack, one Redis stream entry each.

A message carries the sender's id, a sequence number that grows by one with every message of that sender, and items.
Clocks are never compared: where something happened earlier, its age at the time of sending is sent. Block keys go as
16 bytes each. What arrives is data from outside: `decode` checks types and bounds and raises `WireError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

from policies.types import BlockKey

VERSION = 1
MAX_ITEMS = 50_000
MAX_KEYS = 1_000_000
_KEY_BYTES = 16
_WORD = 64
_MASK = (1 << _WORD) - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Age = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * _KEY_BYTES)]


class WireError(Exception):
    """Not a message of ours, or one of another version."""


class Dispatch(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """policies.events.Dispatched. `incarnation` and `space` say of which process and which cut of prompts it speaks;
    `first_age_s` is set where the first token has come already."""

    age_s: Age
    request_id: Name
    replica_id: Name
    incarnation: Annotated[str, msgspec.Meta(max_length=512)]
    space: Annotated[str, msgspec.Meta(max_length=2048)]
    keys: Keys
    block_tokens: Count
    num_tokens: Count
    matched_tokens: Count
    streamed: bool
    session: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    first_age_s: Age | None = None


class First(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    age_s: Age
    request_id: Name
    replica_id: Name
    cached_tokens: Count | None


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    age_s: Age
    request_id: Name
    replica_id: Name
    num_output_tokens: Count
    cached_tokens: Count | None
    num_prompt_tokens: Count | None


class Fail(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    age_s: Age
    request_id: Name
    replica_id: Name
    kind: Name


class Leases(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Every lease that the sender holds now: what is not among them is over."""

    leases: Annotated[list[Dispatch], msgspec.Meta(max_length=MAX_ITEMS)]


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """What the sender heard from a replica's KV events: `op` is stored, removed, cleared or lost."""

    replica_id: Name
    incarnation: Annotated[str, msgspec.Meta(max_length=512)]
    space: Annotated[str, msgspec.Meta(max_length=2048)]
    op: Name
    keys: Keys = b""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The sender lives. `hears` names replicas whose KV events it has without a gap, `lacks` those whose events it
    would want; `asks_leases` and `asks_blocks` (gateway, replica) ask for all leases, and for all blocks of a replica;
    `asks_index` for a fresh snapshot."""

    hears: list[Name]
    lacks: list[Name]
    asks_leases: list[Name] = []
    asks_blocks: list[tuple[Name, Name]] = []
    asks_index: bool = False


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A fresh snapshot of the index lies in Redis (snapshot.py)."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="z"):
    """The sender stops; its leases are over."""


Item = Dispatch | First | Finish | Fail | Leases | Blocks | Beat | Snapshot | Bye


class Message(msgspec.Struct, frozen=True, array_like=True):
    version: int
    gateway_id: Name
    sequence: Count
    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(gateway_id: str, sequence: int, items: list[Item]) -> bytes:
    return _encoder.encode(Message(VERSION, gateway_id, sequence, items))


def decode(data: bytes) -> Message:
    """Raises WireError."""
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"a message that can't be read: {error}") from error
    if message.version != VERSION:
        raise WireError(f"a message of version {message.version}; this gateway speaks version {VERSION}")
    return message


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    words = [word for key in keys for word in (key & _MASK, key >> _WORD)]
    return struct.pack(f"<{len(words)}Q", *words)


def unpack_keys(data: bytes) -> tuple[BlockKey, ...]:
    """Raises WireError when the length is no multiple of a key's."""
    if len(data) % _KEY_BYTES:
        raise WireError(f"{len(data)} bytes are no block keys")
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return tuple(BlockKey(high << _WORD | low) for low, high in zip(words[::2], words[1::2], strict=True))
