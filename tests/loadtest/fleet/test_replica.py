"""A fake replica: the simulator's engine behind real sockets, and what it tells whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_worker.contract import kv_events as wire
from engine_worker.contract.state import TokenizerBundle, WorkerState
from engine_worker.core.scheduler import RequestTooLarge
from engine_worker.core.types import RequestUpdate
from loadtest.fleet.fakes import start_replicas
from loadtest.fleet.http import encoded
from loadtest.fleet.replica import FakeReplica, Manner, ReplicaConfig
from loadtest.fleet.text import Wording, token_ids
from loadtest.fleet.wall import WallClock
from loadtest.sim.clock import Clock
from loadtest.sim.engine import Engine
from loadtest.sim.gpus import GPUS
from loadtest.sim.job import Job
from loadtest.sim.prompts import PromptBook, SimKVCacheManager
from loadtest.sim.simulation import sim_request
from loadtest.sim.trace import TraceRequest
from tests.loadtest.sim.traces import request, timed

W = Wording(512, 16)
SPEEDUP = 500.0
BEFORE = request(90, 91)


class Bench:
    """One replica that listens."""

    def __init__(self, replica: FakeReplica, url: str, clock: WallClock) -> None:
        self.replica, self.url, self.clock = replica, url, clock

    async def ask(self, traced: TraceRequest, unique: str = "x", **more: object) -> list[dict[str, object]]:
        """The stream's events, [DONE] left out."""
        body = {"model": "m", "messages": [{"role": "user", "content": W.prompt(traced, unique)}], "stream": True}
        body |= {"max_tokens": W.output_words(traced), "stream_options": {"include_usage": True}, **more}
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/v1/chat/completions", json=body) as r:
            assert r.status == 200, await r.text()
            self.headers = dict(r.headers)
            events = [line[6:].strip() async for line in r.content if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]


async def bench_of(
    stack: AsyncExitStack, manner: Manner = "warmgate", num_blocks: int = 40, joint_prefill_tokens: int = 512
) -> Bench:
    clock = WallClock(SPEEDUP)
    stack.callback(clock.close)
    config = ReplicaConfig("r00", "m", GPUS["h100"], num_blocks, 8192, 256, manner, joint_prefill_tokens)
    [replica], [url] = await start_replicas(stack, [config], W, clock)
    return Bench(replica, url, clock)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield await bench_of(stack)


async def test_it_is_the_simulators_engine_to_the_moment(bench: Bench) -> None:
    """Requests as they came here, replayed in simulated time: the same hits, first tokens and ends."""
    traced = [
        request(0, 1, 2, tail=100, output=160),
        request(0, 1, 2, 3, tail=16, output=16),
        request(0, 7, 8, 9, 10, tail=500, output=320),
        request(0, 1, 2, 3, 4, 5, tail=1, output=48),
        request(*range(20, 45), tail=33, output=16),  # evicts
        request(0, 1, 2, 3, 4, 5, tail=1, output=48),
    ]
    [served] = [W.as_served(timed(*traced))]
    plays = []
    for number, each in enumerate(traced):
        plays.append(bench.replica.submit(W.prompt(each, number), W.output_words(each)))
        if number % 2:
            await plays[-1].last
    await asyncio.gather(*[play.last for play in plays])

    clock, book, told = Clock(), PromptBook(), {}

    def note(update: RequestUpdate) -> None:
        told.setdefault(update.request_id, []).append((clock.now, update.num_cached_tokens))

    engine = Engine(clock, GPUS["h100"], SimKVCacheManager(40, 512), note, lambda: engine.take_events() and None)
    for play, [each] in zip(plays, served.sessions, strict=True):
        job = Job(play.request.request_id, each, book.names(each.block_ids), play.request.arrival_s)
        clock.at(job.arrived_at, lambda job=job: engine.submit(sim_request(job)))
    clock.run()
    for play in plays:
        [first, *_, last] = told[play.request.request_id] * 2
        assert (play.first_at, play.last_at) == (pytest.approx(first[0]), pytest.approx(last[0]))
        assert play.request.num_cached_tokens == first[1]
    assert any(play.request.num_cached_tokens for play in plays)
    bench.replica.engine.scheduler.check_invariants()


async def test_a_stream_tells_its_tokens_and_what_was_cached(bench: Bench) -> None:
    traced = request(1, 2, 3, tail=160, output=96)
    await bench.ask(traced, "a")
    events = await bench.ask(traced, "b")
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] == 3 * 32 + 10
    assert usage["completion_tokens"] == 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 96}
    assert bench.headers["x-warmgate-cached-tokens"] == "96"
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas).split() == ["bab"] * 6
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_vllms_manner_tells_no_more_than_vllm() -> None:
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, "vllm")
        events = await bench.ask(request(1, 2))
        assert not any(name.startswith("x-warmgate") for name in bench.headers)
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        async with aiohttp.ClientSession() as session:
            assert (await session.get(f"{bench.url}/internal/state")).status == 404
            page = await (await session.get(f"{bench.url}/metrics")).text()
            models = await (await session.get(f"{bench.url}/v1/models")).json()
            body = {"model": "m", "messages": [{"role": "user", "content": W.block(5)}]}
            rendered = await (await session.post(f"{bench.url}/v1/chat/completions/render", json=body)).json()
            before = encoded.cache_info()
            await (await session.post(f"{bench.url}/tokenize", json=body)).read()
            unread = await session.post(f"{bench.url}/v1/chat/completions/render", json={"model": "m"})
        assert tuple(rendered["token_ids"]) == token_ids(W.block(5))
        assert unread.status == 400
        assert encoded.cache_info().hits == before.hits + 1, "once for all who are asked"
        assert 'num_gpu_blocks="40"' in page
        assert 'block_size="32"' in page
        assert models["data"][0]["owned_by"] == "vllm"


async def test_its_state_and_tokenizer_are_a_workers(bench: Bench) -> None:
    async with aiohttp.ClientSession() as session:
        state = msgspec.json.decode(await (await session.get(f"{bench.url}/internal/state")).read(), type=WorkerState)
        data = await (await session.get(f"{bench.url}/internal/tokenizer")).read()
        text = W.block(5)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        told = await (await session.post(f"{bench.url}/tokenize", json=body)).json()
    assert (state.status, state.block_size, state.num_blocks, state.model) == ("ready", 32, 40, "m")
    assert state.step_tokens == 8192 // 16, "in words, as all that it says"
    assert state.max_num_seqs == bench.replica.config.max_num_seqs
    assert state.model_fingerprint, "a gateway tells nobody else how much work it expects"
    assert msgspec.json.decode(data, type=TokenizerBundle).fingerprint == state.tokenizer_fingerprint
    assert tuple(told["tokens"]) == token_ids(text)


async def waits(bench: Bench, *asked: tuple[TraceRequest, float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds from the end of a step that all `asked`, each with its work, waited for to their first tokens."""
    now = bench.clock.read()
    monkeypatch.setattr(bench.clock, "read", lambda: now)  # all of them at one moment
    before, *plays = [
        bench.replica.submit(W.prompt(each, number), 1, work_s)
        for number, (each, work_s) in enumerate([(BEFORE, 0.0), *asked])
    ]
    monkeypatch.undo()
    await asyncio.gather(*[play.last for play in plays])
    assert before.first_at is not None
    return [play.first_at - before.first_at for play in plays]  # type: ignore[operator]


async def test_the_least_work_goes_first_and_without_work_the_first_to_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = request(*range(12)), request(40, tail=9)
    first, second = await waits(bench, (long, 0.01), (short, 0.001), monkeypatch=monkeypatch)
    assert second < first
    first, second = await waits(bench, (request(*range(50, 62)), 0.0), (request(80), 0.0), monkeypatch=monkeypatch)
    assert first < second


async def test_a_step_that_completes_a_prompt_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is started so that steps are filled."""
    firsts = []
    for joint_prefill_tokens in (512, 0):
        async with AsyncExitStack() as stack:
            bench = await bench_of(stack, joint_prefill_tokens=joint_prefill_tokens)
            short, long = (request(40, tail=9), 0.0), (request(*range(20)), 0.0)
            firsts.append((await waits(bench, short, long, monkeypatch=monkeypatch))[0])
    gpu, size, decoding = GPUS["h100"], 512 + 16, (1, 16 * W.num_words(BEFORE) + 1)
    assert firsts[0] == pytest.approx(gpu.step_seconds([(size, 0)], *decoding))
    assert firsts[1] == pytest.approx(gpu.step_seconds([(size, 0), (8191 - size, 0)], *decoding))


@pytest.mark.parametrize(("manner", "work_s"), [("warmgate", 0.25), ("vllm", 0.0)])
async def test_only_a_bundled_worker_knows_the_header(manner: Manner, work_s: float) -> None:
    body = {"model": "m", "prompt": W.prompt(request(1, 2), "x"), "max_tokens": 1000, "stream": True}
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, manner)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        response = await session.post(f"{bench.url}/v1/completions", json=body, headers={"x-warmgate-work": "0.25"})
        await response.content.readline()
        [play] = bench.replica.plays
        assert play.request.work_s == work_s * SPEEDUP, "in the trace's seconds, as the moment that it came"
        response.close()
        bad = await session.post(f"{bench.url}/v1/completions", json=body, headers={"x-warmgate-work": "soon"})
        assert bad.status == (400 if manner == "warmgate" else 200)
        bad.close()


async def test_kv_events_carry_the_words_tokens_and_can_be_replayed(bench: Bench) -> None:
    await bench.ask(request(1, 2, tail=5, output=1200))
    await bench.ask(request(*range(50, 88), tail=5))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(bench.replica.feed.replay_endpoint)
    await socket.send_multipart((b"", wire.encode_sequence(0)))
    events, next_sequence = [], 0
    while (message := wire.decode_frames(await socket.recv_multipart()))[0] >= 0:
        assert message[0] == next_sequence
        next_sequence += 1
        events += wire.decode_batch(message[1]).events
    socket.close()
    context.term()
    stored = [event for event in events if isinstance(event, wire.BlockStored)]
    assert stored[0].token_ids == token_ids(W.block(1) + W.block(2))
    assert stored[0].parent_block_hash is None
    assert stored[1].parent_block_hash == stored[0].block_hashes[-1], "the answer's block, behind the prompt's"
    assert stored[1].token_ids == (0,) * 32 * len(stored[1].block_hashes)
    assert any(isinstance(event, wire.BlockRemoved) for event in events)


async def test_a_client_that_leaves_frees_its_place(bench: Bench) -> None:
    body = {"model": "m", "prompt": W.prompt(request(1, 2), "x"), "max_tokens": 1000, "stream": True}
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{bench.url}/v1/completions", json=body)
        assert b"bab" in await response.content.readline()
        [play] = bench.replica.plays
        response.close()
    await asyncio.wait([play.last], timeout=20)
    assert play.last.cancelled()
    assert bench.replica.counts.num_cancelled == 1
    assert not bench.replica.engine.scheduler.has_work()
    bench.replica.engine.scheduler.check_invariants()
    await bench.ask(request(1, 2))


async def test_what_never_fits_is_refused(bench: Bench) -> None:
    text = W.prompt(request(*range(41)), "x")
    with pytest.raises(RequestTooLarge):
        bench.replica.submit(text, 1)
    async with aiohttp.ClientSession() as session:
        body = {"model": "m", "prompt": text, "max_tokens": 1}
        response = await session.post(f"{bench.url}/v1/completions", json=body)
        assert response.status == 400
        assert "KV cache" in (await response.json())["error"]["message"]
        assert (await session.post(f"{bench.url}/v1/completions", data=b"{")).status == 400


async def test_an_unstreamed_answer_is_whole(bench: Bench) -> None:
    body = {"model": "m", "prompt": W.prompt(request(1, 2), "x"), "max_tokens": 3}
    async with aiohttp.ClientSession() as session:
        told = await (await session.post(f"{bench.url}/v1/completions", json=body)).json()
    assert told["choices"][0]["text"] == "bab bab bab "
    assert told["usage"]["completion_tokens"] == 3
