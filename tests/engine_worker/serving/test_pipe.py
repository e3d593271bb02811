"""Messages between the processes: whole however the stream is cut, and an end that both sides see."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.serving.messages import Beat, Cancel, FromEngine, Progress, Shutdown
from engine_worker.serving.pipe import APISide, EngineSide, FrameReader, framed


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=20))
def test_payloads_are_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)
    reader, found = FrameReader(), []
    for size in cuts:
        found += reader.feed(stream[:size])
        stream = stream[size:]
    found += reader.feed(stream)
    assert found == payloads


async def open_both(got: list[FromEngine]) -> tuple[APISide, EngineSide]:
    api, theirs = await APISide.open(got.append)
    return api, EngineSide(theirs.detach())


async def test_messages_cross_both_ways_and_large_ones_whole() -> None:
    got: list[FromEngine] = []
    api, engine = await open_both(got)
    api.send(Cancel(["r1"]))
    api.send(Cancel(["r2", "x" * 3_000_000]))  # more than any buffer of the kernel
    orders = []
    while len(orders) < 2:
        orders += await asyncio.to_thread(engine.receive, 1000)
    assert orders == [Cancel(["r1"]), Cancel(["r2", "x" * 3_000_000])]
    await asyncio.to_thread(engine.send, Progress("y" * 3_000_000))
    engine.send(Beat())
    engine.close()
    await api.ended
    assert got == [Progress("y" * 3_000_000), Beat()]


async def test_the_engine_sees_the_end_as_an_order_to_stop() -> None:
    api, engine = await open_both([])
    assert engine.receive(0) == []
    api.send(Cancel(["r1"]))
    api.close()
    messages = await asyncio.to_thread(engine.receive, 1000)
    messages += [] if Shutdown() in messages else await asyncio.to_thread(engine.receive, 1000)
    assert messages[-1] == Shutdown()
    engine.close()


async def test_what_cannot_be_read_ends_the_stream_with_its_reason() -> None:
    api, theirs = await APISide.open(lambda message: None)
    with theirs:
        theirs.sendall(framed(Beat()) + b"\1\0\0\0\xc1")
        with pytest.raises(Exception, match="MessagePack"):
            await api.ended
