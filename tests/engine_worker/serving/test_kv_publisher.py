"""The worker's publisher, read with plain ZMQ sockets as any subscriber in the field would."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from engine_worker.contract import kv_events as wire
from engine_worker.core import events as core
from engine_worker.core.types import BlockHash
from engine_worker.serving.kv_publisher import KVPublisher, to_wire

HANG_MS = 60_000


def stored(n: int, parent: bytes | None = None, salt: str = "") -> core.BlocksStored:
    return core.BlocksStored(
        block_hashes=(BlockHash(bytes([n % 256] * 32)), BlockHash(bytes([n % 256] * 31 + [1]))),
        parent_block_hash=None if parent is None else BlockHash(parent),
        token_ids=(n, n + 1, n + 2, n + 3),
        block_size=2,
        salt=salt,
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[KVPublisher]:
    publisher = KVPublisher("tcp://127.0.0.1:0", replay_batches=50)
    yield publisher
    publisher.close()


def received(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(HANG_MS), "nothing came"
    return socket.recv_multipart()


def replay(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first: int) -> dict[int, bytes]:
    """Everything that a replay from `first` brings."""
    batches: dict[int, bytes] = {}
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart([b"", wire.encode_sequence(first)])
        while True:
            delimiter, topic, sequence, payload = received(socket)
            assert (delimiter, topic) == (b"", b"")
            if sequence == wire.END_OF_REPLAY:
                assert payload == b""
                return batches
            batches[int.from_bytes(sequence, "big")] = payload


def published(context: zmq.Context[zmq.Socket[bytes]], publisher: KVPublisher, num_batches: int) -> dict[int, bytes]:
    """A replay from 0 once all batches have gone out."""
    while True:
        batches = replay(context, publisher.replay_endpoint, 0)
        if batches and max(batches) == num_batches - 1:
            return batches


def test_subscribers_get_numbered_batches(context: zmq.Context[zmq.Socket[bytes]], publisher: KVPublisher) -> None:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(publisher.endpoint)
    number = 0
    while not socket.poll(20):  # until the subscription has arrived
        publisher.publish([stored(number)])
        number += 1
    topic, sequence, payload = received(socket)
    first = int.from_bytes(sequence, "big")
    assert topic == b""
    assert wire.decode_batch(payload).events == (to_wire(stored(first)),)
    for following in range(first + 1, number):
        assert int.from_bytes(received(socket)[1], "big") == following


def test_a_replay_starts_where_it_is_asked_to_and_ends_with_a_marker(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KVPublisher
) -> None:
    for n in range(20):
        publisher.publish([stored(n), core.AllBlocksCleared()])
    batches = published(context, publisher, 20)
    assert sorted(batches) == list(range(20))
    assert wire.decode_batch(batches[3]).events == (to_wire(stored(3)), wire.AllBlocksCleared())
    assert replay(context, publisher.replay_endpoint, 17) == {n: batches[n] for n in (17, 18, 19)}
    assert replay(context, publisher.replay_endpoint, 99) == {}


def test_the_replay_buffer_keeps_the_newest(context: zmq.Context[zmq.Socket[bytes]], publisher: KVPublisher) -> None:
    for n in range(120):
        publisher.publish([stored(n)])
    assert sorted(published(context, publisher, 120)) == list(range(70, 120))


def test_nothing_to_say_takes_no_number(context: zmq.Context[zmq.Socket[bytes]], publisher: KVPublisher) -> None:
    publisher.publish([])
    publisher.publish([stored(1)])
    assert sorted(published(context, publisher, 1)) == [0]


def test_rubbish_on_the_replay_socket_is_ignored(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KVPublisher
) -> None:
    publisher.publish([stored(1)])
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""], [b"", wire.END_OF_REPLAY]):
        socket.send_multipart(frames)
    assert received(socket)[2] == wire.END_OF_REPLAY, "a start beyond all numbers has an empty replay"
    assert sorted(published(context, publisher, 1)) == [0]


def test_the_salt_is_an_extra_key_of_the_first_block_only() -> None:
    event = to_wire(stored(1, salt="tenant"))
    assert isinstance(event, wire.BlockStored)
    assert event.extra_keys == (("tenant",), None)
    behind = to_wire(stored(1, parent=b"p" * 32, salt="tenant"))
    assert isinstance(behind, wire.BlockStored)
    assert behind.extra_keys is None
    assert to_wire(core.BlocksRemoved(block_hashes=(BlockHash(b"h"),))) == wire.BlockRemoved(
        block_hashes=(b"h",), medium="GPU"
    )


def test_addresses_are_as_bound() -> None:
    publisher = KVPublisher("tcp://0.0.0.0:0")
    try:
        assert publisher.endpoint.startswith("tcp://*:")
        assert publisher.replay_endpoint.startswith("tcp://*:")
        assert publisher.endpoint != publisher.replay_endpoint
        with pytest.raises(OSError, match="can't be had: Address already in use"):
            KVPublisher(publisher.endpoint)
    finally:
        publisher.close()


@pytest.mark.parametrize("endpoint", ["5557", "tcp://127.0.0.1", "tcp://127.0.0.1:http", "nonsense://x"])
def test_a_bad_address_is_refused_with_a_sentence(endpoint: str) -> None:
    with pytest.raises(OSError, match=r"can't be had|is no address"):
        KVPublisher(endpoint)


def test_close_sends_what_is_queued_and_leaves_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    before = threading.active_count()
    publisher = KVPublisher("tcp://127.0.0.1:0")
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(publisher.endpoint)
    number = 0
    while not socket.poll(20):
        publisher.publish([stored(number)])
        number += 1
    for _ in range(100):
        publisher.publish([stored(number)])
        number += 1
    publisher.close()
    publisher.close()
    publisher.publish([stored(0)])  # a straggler after the end is dropped, not an error
    last = -1
    while last < number - 1:
        last = int.from_bytes(received(socket)[1], "big")
    assert threading.active_count() == before
