"""The supervisor with a real engine process: lives follow each other, and a silent engine is not waited for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine_worker.config import EngineConfig
from engine_worker.contract.errors import ApiError
from engine_worker.serving.engine_client import Call, EngineClient
from engine_worker.serving.engine_supervisor import EngineSupervisor
from engine_worker.serving.messages import Ready
from engine_worker.serving.prepare import PreparedCall
from tests.engine_worker.serving.calls import prepared_call
from tests.engine_worker.serving.fake_engine import make_tokenizer
from tests.support.processes import descendants

LOADER = "tests.engine_worker.serving.fake_engine:load_fake"


class Life:
    """A supervisor and what it started: children of this process that were not there before."""

    def __init__(self, stall_s: float) -> None:
        self._others = set(descendants(os.getpid()))  # other tests' helpers, such as multiprocessing's tracker
        self.client = EngineClient()
        self.readies: asyncio.Queue[Ready] = asyncio.Queue()
        self.num_lost = 0
        self.supervisor = EngineSupervisor(
            EngineConfig(model="fake"),
            self.client,
            loader=LOADER,
            check_invariants=True,
            on_ready=self.readies.put_nowait,
            on_step=lambda step: None,
            on_lost=self._lost,
            stall_s=stall_s,
        )

    def _lost(self) -> None:
        self.num_lost += 1

    def engines(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid not in self._others]


@asynccontextmanager
async def supervised(stall_s: float = 60.0) -> AsyncIterator[Life]:
    life = Life(stall_s)
    running = asyncio.create_task(life.supervisor.run())
    try:
        await life.readies.get()
        yield life
    finally:
        await life.supervisor.stop()
        await running


def slow_call() -> PreparedCall:
    return prepared_call(make_tokenizer().encode("[slow]").ids, max_tokens=3000, ignore_eos=True)


async def news_to_the_end(call: Call) -> None:
    while True:
        await call.news()


async def test_an_engine_without_news_is_replaced() -> None:
    async with supervised(stall_s=0.5) as life:
        first = life.supervisor.incarnation
        [engine] = life.engines()
        with life.client.submit(slow_call()) as call:
            await call.news()
            os.kill(engine, signal.SIGSTOP)
            with pytest.raises(ApiError) as caught:
                await news_to_the_end(call)
        assert (caught.value.status, caught.value.code) == (503, "engine_restarting")
        assert life.num_lost == 1
        assert life.client.num_in_flight == 0
        await life.readies.get()
        assert life.supervisor.incarnation != first
        with life.client.submit(slow_call()) as call:
            assert await call.news()
        life.client.check_invariants()


async def test_an_idle_engine_may_be_silent() -> None:
    """No call waits for it, so nothing is wrong with an engine that has nothing to say."""
    async with supervised(stall_s=0.05) as life:
        [engine] = life.engines()
        await asyncio.sleep(0.3)  # several rounds of the watchdog
        assert life.engines() == [engine]
        assert life.num_lost == 0


async def test_a_cancelled_supervisor_leaves_no_process() -> None:
    life = Life(60.0)
    running = asyncio.create_task(life.supervisor.run())
    await life.readies.get()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert life.engines() == []
