"""The machine's limits are those of the fastest way, and transformers' batching answers as an engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from engine_worker.bench import limits
from engine_worker.bench.transformers_peer import Peer
from loadtest.engine_bench import Case, EngineFailed, compare, run_case
from tests.engine_worker.model.checkpoints import edit_json, save_checkpoint

pytestmark = pytest.mark.engine

TINY = Case("tiny", 3, 2, 4, 0, 6, "output")


def test_the_fastest_way_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 0.25, 3.0, 2.0, 4.0])  # two ways of reading, then products

    def least_s(work: Callable[[], object]) -> float:
        work()
        return next(times, 9.0)

    monkeypatch.setattr(limits, "_STREAM_FLOATS", 1000)
    monkeypatch.setattr(limits, "_SHAPE", (3, 32, 5))
    monkeypatch.setattr(limits, "_least_s", least_s)
    bandwidth, arithmetic = limits.measured_limits()
    assert bandwidth == 4000 / 0.25
    assert arithmetic == pytest.approx(2 * 3 * 32 * 5 / 2.0)


def test_all_ways_give_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [work() for work in limits._products(3, 32, 5)]
    assert all((product == 5).all() for product in products)  # type: ignore[attr-defined]
    assert len(products) >= 1


def test_transformers_batching_can_be_compared_with(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<s>")

    async def measured() -> dict[str, dict[str, float]]:
        runner = web.AppRunner(Peer(str(tmp_path), num_blocks=64, page_size=16, max_batch_tokens=64).app())
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = "http://{}:{}".format(*runner.addresses[0][:2])
            async with aiohttp.ClientSession() as session:
                assert await run_case(session, url, "peer", TINY, 1) > 0
                with pytest.raises(EngineFailed):
                    await run_case(session, url + "/elsewhere", "peer", TINY, 1)
            return await compare({"one": url, "two": url}, 2, 5, [TINY])
        finally:
            await runner.cleanup()

    found = asyncio.run(measured())
    assert found.keys() == {"tiny"}
    assert all(value > 0 for value in found["tiny"].values())
