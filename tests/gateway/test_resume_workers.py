"""Bundled workers that are killed under a load of greedy streams: no answer changes by a byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.tiny_llama import write_tiny_llama
from tests.engine_worker.serving.running_worker import RunningWorker, running_worker
from tests.gateway.harness import Running, gateway, until

pytestmark = pytest.mark.engine

NUM_STREAMS = 30
NUM_TOKENS = 100
EARLY = 10  # tokens that some stream of a worker has when it is killed


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningWorker]]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    flags = (
        *("--load-format", "dummy", "--kv-cache-memory", "4MiB", "--threads", "1", "--served-model-name", "fake"),
        *("--max-num-seqs", "4"),  # so that some are in mid-answer for long, however late the kill comes
    )
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(running_worker(*flags, model=str(folder), module="engine_worker")) for _ in range(2)
        ]
        for worker in running:
            worker.until_ready()
        yield running


class Stream:
    """One answer as it comes."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.data = b""
        self.replica = ""

    @property
    def num_events(self) -> int:
        return self.data.count(b"\ndata:")

    async def read(self, running: Running) -> None:
        async with running.client.stream("POST", "/v1/chat/completions", json=self.body) as response:
            assert response.status_code == 200, await response.aread()
            self.replica = response.headers["x-warmgate-replica"]
            async for chunk in response.aiter_bytes():
                self.data += chunk

    def check(self) -> tuple[str, Any]:
        """By the rules of streams; gives its text and usage."""
        lines = [line for line in self.data.decode().split("\n") if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
        usage = chunks.pop()["usage"]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert ["role" in choice["delta"] for choice in choices].count(True) == 1
        usage.pop("prompt_tokens_details")  # what is cached depends on who was there before
        return "".join(choice["delta"].get("content", "") for choice in choices), usage


def bodies(what: str) -> list[dict[str, Any]]:
    """Half of them greedy, half of them sampled with a seed."""
    common = {"model": "fake", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    made = []
    for n in range(NUM_STREAMS):
        chosen = {"temperature": 0} if n % 2 else {"temperature": 1.0, "seed": n}
        messages = [{"role": "user", "content": f"{what}, number {n}"}]
        made.append({**common, **chosen, "messages": messages, "stream_options": {"include_usage": True}})
    return made


async def read_all(running: Running, streams: list[Stream]) -> None:
    async with asyncio.timeout(300):
        await asyncio.gather(*(stream.read(running) for stream in streams))


@pytest.mark.parametrize("victim", ["engine", "worker"])
async def test_a_kill_in_mid_answer_changes_no_byte(workers: list[RunningWorker], victim: str) -> None:
    urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
    async with gateway(urls=urls, wait=False, request_s=300.0) as running:
        await until(lambda: len(running.app.registry.ready("fake")) == 2)
        asked = bodies(f"the {victim} is killed")
        undisturbed = [Stream(body) for body in asked]
        await read_all(running, undisturbed)
        streams = [Stream(body) for body in asked]
        reading = asyncio.ensure_future(read_all(running, streams))
        dying = workers[0] if victim == "engine" else workers[1]
        name = f"127.0.0.1:{dying.port}"
        await until(lambda: any(each.replica == name and each.num_events >= EARLY for each in streams))
        os.kill(dying.engine_pid if victim == "engine" else dying.process.pid, signal.SIGKILL)
        await reading
        num_there = sum(stream.replica == name for stream in streams)
        for stream, reference in zip(streams, undisturbed, strict=True):
            assert stream.check() == reference.check()
        num_moved = sum(b": resumed" in stream.data for stream in streams)
        assert 0 < num_moved <= num_there
        assert running.events("warmgate_resumes_total") == num_moved
