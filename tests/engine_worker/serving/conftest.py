"""One worker for all tests of this folder that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine_worker.serving.running_worker import RunningWorker, running_worker


@pytest.fixture(scope="package")
def shared_worker() -> Iterator[RunningWorker]:
    """Two sequences at once, 16 tokens a step, 512 blocks of 16 tokens."""
    with running_worker(
        "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--kv-cache-memory", "8192",
        "--served-model-name", "fake", "--served-model-name", "org/alias",
    ) as worker:  # fmt: skip
        worker.until_ready()
        yield worker


@pytest.fixture
def worker(shared_worker: RunningWorker) -> Iterator[RunningWorker]:
    yield shared_worker
    shared_worker.until_idle()
