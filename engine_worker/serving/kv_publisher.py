"""Publishes the prefix cache's events over ZMQ, in vLLM's format (contract/kv_events.py).

`publish` only numbers a step's events and puts them on a queue; a thread of its own encodes and sends them, keeps the
last ones and answers requests to replay them. So the engine loop waits neither for the network nor for msgpack.

Nothing here may grow without bound: the queue and the replay buffer forget their oldest batches, and a peer that does
not read loses messages. Each loss leaves a hole in the sequence numbers, which a subscriber sees.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from engine_worker.contract import kv_events as wire
from engine_worker.core import events as core

log = logging.getLogger(__name__)

REPLAY_BATCHES = 10_000
QUEUED_BATCHES = 100_000
_PEER_MESSAGES = 100_000  # what a slow subscriber may have outstanding before it loses messages


class KVPublisher:
    """One engine's event stream, from sequence number 0.

    endpoint         tcp://HOST:PORT with port 0 for any free one, or ipc://PATH
    replay_endpoint  where replays are asked for; None is one port above (any free one for port 0), or PATH.replay
    replay_batches   how many batches a replay can reach back

    `endpoint` and `replay_endpoint` are as bound, with host `*` when bound to all interfaces. `publish` may be called
    from one thread, `close` from any, and more than once. Raises OSError, naming the address, where it can't be had.
    """

    def __init__(
        self, endpoint: str, *, replay_endpoint: str | None = None, replay_batches: int = REPLAY_BATCHES
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub, self.endpoint = _bind(self._context, zmq.PUB, endpoint)
            self._router, self.replay_endpoint = _bind(
                self._context, zmq.ROUTER, replay_endpoint or _replay_address(endpoint)
            )
        except OSError:
            self._context.destroy(linger=0)
            raise
        self._queue: deque[tuple[int, Sequence[core.KVEvent]]] = deque(maxlen=QUEUED_BATCHES)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=replay_batches)
        self._next_sequence = 0
        self._closing = False
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._closed = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[core.KVEvent]) -> None:
        """Send a step's events as one batch, soon. Never blocks."""
        if not events or self._closing:
            return
        self._queue.append((self._next_sequence, events))
        self._next_sequence += 1
        self._wake()

    def close(self) -> None:
        """Send what is queued and close the sockets."""
        with self._closed:
            if self._closing:
                return
            self._closing = True
            self._wake()
            self._thread.join()
            self._context.destroy(linger=200)
            os.close(self._wake_out)
            os.close(self._wake_in)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_in, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._wake_out in ready:
                os.read(self._wake_out, 65536)
            self._guarded(self._send_queued)
            if self._router in ready:
                self._guarded(self._replay)
        self._guarded(self._send_queued)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # The cache works without its events; the hole in the sequence tells the subscribers.
            log.exception("publishing KV events failed")

    def _send_queued(self) -> None:
        while self._queue:
            sequence, events = self._queue.popleft()
            payload = wire.encode_batch(time.time(), map(to_wire, events))
            self._sent.append((sequence, payload))
            self._pub.send_multipart((b"", wire.encode_sequence(sequence), payload))

    def _replay(self) -> None:
        """Answer one request: [identity, empty, first sequence number]."""
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != wire.SEQUENCE_BYTES:
            log.warning("a replay request with %d frames was ignored", len(frames))
            return
        peer, _, start = frames
        first = int.from_bytes(start, "big")
        for sequence, payload in self._sent:
            if sequence >= first:
                self._router.send_multipart((peer, b"", b"", wire.encode_sequence(sequence), payload))
        self._router.send_multipart((peer, b"", b"", wire.END_OF_REPLAY, b""))


def to_wire(event: core.KVEvent) -> wire.WireEvent:
    """The engine's event as vLLM would publish it: the salt is an extra key of a chain's first block."""
    match event:
        case core.BlocksStored():
            extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
            if event.salt and event.parent_block_hash is None:
                extra_keys = ((event.salt,), *[None] * (len(event.block_hashes) - 1))
            return wire.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                medium=wire.MEDIUM_DEVICE,
                extra_keys=extra_keys,
            )
        case core.BlocksRemoved():
            return wire.BlockRemoved(block_hashes=event.block_hashes, medium=wire.MEDIUM_DEVICE)
        case core.AllBlocksCleared():
            return wire.AllBlocksCleared()


def _replay_address(endpoint: str) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.replay"
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise OSError(f"{endpoint!r} is no address; write it as tcp://HOST:PORT or ipc://PATH")
    return endpoint if port == "0" else f"{host}:{int(port) + 1}"


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
    """A bound socket and its address as others reach it."""
    socket = context.socket(kind)
    socket.set_hwm(_PEER_MESSAGES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise OSError(f"{endpoint} can't be had: {error.strerror}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:"):
        bound = bound.replace(wildcard, "tcp://*:")
    return socket, bound
