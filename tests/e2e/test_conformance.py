"""The conformance checks, against a gateway in front of bundled workers: all must hold.

Nothing here asserts a time: a client that left must be noticed, the command's own run says how soon.
"""

from __future__ import annotations

import pytest

from loadtest.conformance.checks import CATEGORIES, run_all
from loadtest.conformance.cli import selected
from loadtest.conformance.target import Target
from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_all_checks_hold(stack: Stack, category: str) -> None:
    stack.until_all_up()
    target = Target(stack.base_url, stack.model, timeout_s=300, abort_within_s=60, worker_urls=list(stack.worker_urls))
    try:
        results = run_all(selected([f"{category}:"]), target, num_threads=12)  # generation is batched
    finally:
        target.close()
    assert len(results) >= 10
    failed = [f"{result.claim}: {result.reason}" for result in results if result.outcome == "failed"]
    assert not failed, "\n".join(failed)
    assert not [
        result
        for result in results
        if result.outcome == "skipped" and "openai" not in result.reason and "suffix" not in result.reason
    ]
