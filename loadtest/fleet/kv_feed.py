"""A fake replica's KV events over ZMQ, in vLLM's format: the engine's own events, with the words' token ids in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from engine_worker.contract import kv_events as wire
from engine_worker.core import events as core

REPLAY_BATCHES = 10_000
_PEER_MESSAGES = 100_000


class KVFeed:
    """Publishes batches from sequence number 0 and replays the last ones.

    block_ids  the token ids of a block, given what stands in for them in the engine's events
    """

    def __init__(
        self, context: zmq.asyncio.Context, host: str, block_words: int,
        block_ids: Callable[[int], Sequence[int]],
    ) -> None:  # fmt: skip
        self._block_words = block_words
        self._block_ids = block_ids
        # PUB from plain sockets: sending to it never waits, it drops what a slow peer can't take.
        self._pub = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(_PEER_MESSAGES)
        self.endpoint = f"tcp://{host}:{self._pub.bind_to_random_port(f'tcp://{host}')}"
        self.replay_endpoint = f"tcp://{host}:{self._router.bind_to_random_port(f'tcp://{host}')}"
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._next = 0
        self._task = asyncio.create_task(self._replays())

    def publish(self, events: Sequence[core.KVEvent]) -> None:
        """One engine step's events, as one batch."""
        if not events:
            return
        payload = wire.encode_batch(time.time(), map(self._to_wire, events))
        self._sent.append((self._next, payload))
        self._pub.send_multipart((b"", wire.encode_sequence(self._next), payload))
        self._next += 1

    def _to_wire(self, event: core.KVEvent) -> wire.WireEvent:
        match event:
            case core.BlocksStored():
                assert len(event.token_ids) == len(event.block_hashes), "one number stands in for a block's tokens"
                ids = [token_id for block in event.token_ids for token_id in self._block_ids(block)]
                return wire.BlockStored(
                    block_hashes=event.block_hashes,
                    parent_block_hash=event.parent_block_hash,
                    token_ids=tuple(ids),
                    block_size=self._block_words,
                    medium=wire.MEDIUM_DEVICE,
                )
            case core.BlocksRemoved():
                return wire.BlockRemoved(block_hashes=event.block_hashes, medium=wire.MEDIUM_DEVICE)
            case core.AllBlocksCleared():
                return wire.AllBlocksCleared()

    async def _replays(self) -> None:
        """Answers requests [identity, empty, first sequence number]."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != wire.SEQUENCE_BYTES:
                continue
            first = int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._sent):
                if sequence >= first:
                    await self._router.send_multipart((frames[0], b"", b"", wire.encode_sequence(sequence), payload))
            await self._router.send_multipart((frames[0], b"", b"", wire.END_OF_REPLAY, b""))

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._pub.close()
        self._router.close()
