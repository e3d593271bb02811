"""The index in Redis, so that a new gateway begins with what the others (or its own earlier life) knew.

Every `REWRITE_S`, when it is gone, and when a newcomer asks, one gateway writes what each replica is expected to hold:
stretches of block keys, the youngest first, with the time since their last use. It goes in parts under own names,
and last the list of parts; all of it expires with `EXPIRY_S`. Reading takes it as predictions, older than whatever is
known already, and only for replicas that are the same process with the same cut of prompts.

Both sides yield to the event loop after every few stretches.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

import msgspec

from gateway.sharing.link import Link
from gateway.sharing.wire import WireError, pack_keys, unpack_keys
from policies.block_runs import Hold
from policies.types import BlockKey, ReplicaId

EXPIRY_S = 180
REWRITE_S = 30.0
PART_BYTES = 256 * 1024
MAX_PARTS = 512
_STEPS_BETWEEN_YIELDS = 50


class Section(msgspec.Struct, frozen=True, array_like=True):
    """Stretches of one replica: (seconds since the last use, packed keys)."""

    replica_id: str
    incarnation: str
    space: str
    stretches: list[tuple[float, bytes]]


class Contents(msgspec.Struct, frozen=True, array_like=True):
    snapshot_id: str
    num_parts: int


class Held(NamedTuple):
    """A replica and what it holds, for writing."""

    replica_id: ReplicaId
    incarnation: str
    space: str
    holds: list[Hold]


Taker = Callable[[tuple[BlockKey, ...], float], None]
Recall = Callable[[Section], Taker | None]

_contents = msgspec.msgpack.Decoder(Contents)
_section = msgspec.msgpack.Decoder(Section)


async def write(link: Link, prefix: str, replicas: Iterable[Held], clock: Callable[[], float] = time.monotonic) -> int:
    """Returns the number of parts. Raises LinkDown; an unfinished snapshot is never read, and expires."""
    snapshot_id = secrets.token_hex(6)
    num_parts = 0
    async for part in _parts(replicas, clock):
        await link.raw("SET", f"{prefix}:index:{snapshot_id}:{num_parts}", part, "EX", EXPIRY_S)
        num_parts += 1
        if num_parts == MAX_PARTS:
            break
    contents = msgspec.msgpack.encode(Contents(snapshot_id, num_parts))
    await link.raw("SET", f"{prefix}:index", contents, "EX", EXPIRY_S)
    return num_parts


async def _parts(replicas: Iterable[Held], clock: Callable[[], float]) -> AsyncIterator[bytes]:
    encode = msgspec.msgpack.encode
    for replica in replicas:
        name = (replica.replica_id, replica.incarnation, replica.space)
        stretches: list[tuple[float, bytes]] = []
        size = 0
        for step, hold in enumerate(replica.holds):
            if step % _STEPS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            keys = hold.run.keys[: hold.num_blocks]  # of now: it may have been evicted meanwhile
            if not keys:
                continue
            packed = pack_keys(keys)
            stretches.append((max(clock() - hold.used_at, 0.0), packed))
            size += len(packed)
            if size >= PART_BYTES:
                yield encode(Section(*name, stretches))
                stretches, size = [], 0
        if stretches:
            yield encode(Section(*name, stretches))


async def read(link: Link, prefix: str, recall: Recall) -> int:
    """Give every stretch to what `recall` answers for its section (None: not wanted). Returns how many blocks it was.

    Raises LinkDown, and WireError for what is no snapshot. Parts that have expired are left out.
    """
    found = await link.raw("GET", f"{prefix}:index")
    if found is None:
        return 0
    try:
        contents = _contents.decode(found)
        num_blocks = 0
        for number in range(min(contents.num_parts, MAX_PARTS)):
            part = await link.raw("GET", f"{prefix}:index:{contents.snapshot_id}:{number}")
            if part is not None:
                num_blocks += await _recall(_section.decode(part), recall)
    except msgspec.DecodeError as error:
        raise WireError(f"the snapshot in Redis can't be read: {error}") from error
    return num_blocks


async def _recall(section: Section, recall: Recall) -> int:
    take = recall(section)
    if take is None:
        return 0
    num_blocks = 0
    for step, (age_s, packed) in enumerate(section.stretches):
        if step % _STEPS_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)
        keys = unpack_keys(packed)
        take(keys, age_s)
        num_blocks += len(keys)
    return num_blocks
