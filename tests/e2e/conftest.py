"""One stack for the end-to-end tests: `warmgate up` with the demo model and two workers, on free ports."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from loadtest.conversations import prose
from tests.support.processes import Process, descendants, free_port, free_ports

LOAD_LIMIT_S = 600  # the first start converts the demo model
NUM_WORKERS = 2

# Faster to notice trouble than the defaults, so that the tests of trouble are short.
GATEWAY_SETTINGS = """\
poll_interval_s: 0.25
poll_timeout_s: 2
stuck_after_s: 5
first_token_s: 60
"""


@dataclass(frozen=True)
class Stack:
    """A running `warmgate up`. Workers are numbered from 0."""

    up: Process
    base_url: str
    model: str
    worker_urls: tuple[str, ...]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key="unused", max_retries=0, timeout=120)

    def replica_name(self, worker: int) -> str:
        return self.worker_urls[worker].removeprefix("http://")

    def worker_index(self, replica: str) -> int:
        return [self.replica_name(i) for i in range(len(self.worker_urls))].index(replica)

    def worker_pid(self, worker: int) -> int:
        """The worker's first process, which leads its process group."""
        port = self.worker_urls[worker].rpartition(":")[2]
        for pid in descendants(self.up.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "engine_worker" in words and port in words:
                return pid
        raise AssertionError(f"no process of worker {worker}")

    def worker_state(self, worker: int) -> dict:
        return httpx.get(f"{self.worker_urls[worker]}/internal/state", timeout=10, trust_env=False).json()

    def metrics(self) -> str:
        return httpx.get(f"{self.base_url}/metrics", timeout=10, trust_env=False).text

    def is_up(self, worker: int) -> bool:
        """Whether the gateway gives this worker new requests."""
        name = re.escape(self.replica_name(worker))
        return bool(re.search(rf'^warmgate_replica_up{{replica="{name}"}} 1\.0$', self.metrics(), re.M))

    def until_all_up(self) -> None:
        self.up.until(
            "every worker is in service", lambda: all(map(self.is_up, range(len(self.worker_urls)))), LOAD_LIMIT_S
        )

    def until_idle(self) -> None:
        def idle() -> bool:
            states = [self.worker_state(i) for i in range(len(self.worker_urls))]
            return all(state["num_running"] == state["num_waiting"] == 0 for state in states)

        self.up.until("no worker has a request", idle)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    port, worker_port = free_port(), free_ports(NUM_WORKERS)
    config = tmp_path_factory.mktemp("gateway") / "settings.yaml"
    config.write_text(GATEWAY_SETTINGS)
    command = [
        *(sys.executable, "-m", "gateway.cli", "up", "--workers", str(NUM_WORKERS)),
        *("--port", str(port), "--worker-port", str(worker_port), "--gateway-config", str(config)),
    ]
    with Process(command) as up:
        found = up.until_output(r"Warmgate is ready at (\S+)/v1 \(model (.+?), 2 workers", LOAD_LIMIT_S)
        workers = tuple(f"http://127.0.0.1:{worker_port + i}" for i in range(NUM_WORKERS))
        running = Stack(up, found[1], found[2], workers)
        running.until_all_up()
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The SDK, with every worker in service."""
    stack.until_all_up()
    with stack.client() as made:
        yield made


@pytest.fixture
def long_prompt() -> str:
    """A few hundred tokens that no other test has sent."""
    rng = random.Random()
    return f"Case {rng.getrandbits(64)}. {prose(rng, 300)}"
