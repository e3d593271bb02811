"""A gateway and a worker as they are run, for junk to be thrown at.

Fast and the same each time in `make test`. `WARMGATE_FUZZ=50 make test PYTEST=tests/fuzz` tries fifty times as much,
another choice each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.engine_worker.serving.running_worker import RunningWorker, running_worker
from tests.support.processes import Process, free_port, python

FACTOR = int(os.environ.get("WARMGATE_FUZZ", "1"))
HANG_GUARD_S = 60.0


def effort(num_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """hypothesis's settings for a test that makes that many examples in `make test`."""
    return settings(
        max_examples=num_examples * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Pair:
    """`gateway` in front of `worker`; both have everything they said in their output."""

    gateway: Process
    gateway_port: int
    worker: RunningWorker

    @property
    def ports(self) -> dict[str, int]:
        return {"gateway": self.gateway_port, "worker": self.worker.port}

    def check_serving(self) -> None:
        """Both answer a real request, hold nothing, and have met no exception that they had not foreseen."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        for name, port in self.ports.items():
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, (name, answer.text)
        self.worker.until_idle()
        for process in (self.gateway, self.worker.process):
            assert process.status is None, process.output[-4000:]
            _, found, trace = process.output.partition("Traceback")
            assert not found, f"{process.command}: {found}{trace[:8000]}"


@pytest.fixture(scope="session")
def started_pair() -> Iterator[Pair]:
    with running_worker() as worker:
        worker.until_ready()
        port = free_port()
        url = f"http://127.0.0.1:{worker.port}"
        with python("-m", "gateway.cli", "serve", "--replica", url, "--port", str(port), "--access-log", "") as gateway:
            gateway.until_http(f"http://127.0.0.1:{port}/ready")
            yield Pair(gateway, port, worker)


@pytest.fixture
def pair(started_pair: Pair) -> Iterator[Pair]:
    yield started_pair
    started_pair.check_serving()
