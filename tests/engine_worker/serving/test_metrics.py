"""Counters that only grow, whatever the engine behind them does."""

from __future__ import annotations

import asyncio

import pytest

from engine_worker.contract.errors import ApiError
from engine_worker.core.types import FinishReason
from engine_worker.serving.http import ClientGone
from engine_worker.serving.messages import Stats, Step
from engine_worker.serving.metrics import WorkerMetrics
from tests.engine_worker.serving.calls import prepared_call

LABELS = '{engine="0",model_name="m"}'


def value(metrics: WorkerMetrics, name: str, labels: str = LABELS) -> float:
    prefix = f"vllm:{name}{labels} "
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(prefix)]
    assert len(lines) == 1, f"{name}: {lines}"
    return float(lines[0].removeprefix(prefix))


def ended(metrics: WorkerMetrics, reason: str) -> float:
    return value(metrics, "request_success_total", f'{{engine="0",finished_reason="{reason}",model_name="m"}}')


def test_an_engines_counts_are_added_up_over_its_lives() -> None:
    metrics = WorkerMetrics("m")
    metrics.step(Step([], Stats(prefix_cache_queries=10, prefix_cache_hits=4, num_preemptions=1, num_blocks=8), 3))
    metrics.engine_lost()
    assert value(metrics, "prefix_cache_queries_total") == 10
    metrics.step(Step([], Stats(prefix_cache_queries=5, num_blocks=8, num_free_blocks=6), 3))
    assert value(metrics, "prefix_cache_queries_total") == 15
    assert value(metrics, "prefix_cache_hits_total") == 4
    assert value(metrics, "num_preemptions_total") == 1
    assert value(metrics, "kv_cache_usage_perc") == 0.25


def test_what_is_left_of_a_request_is_an_abort_or_an_error() -> None:
    metrics = WorkerMetrics("m")
    with metrics.request(prepared_call(n=3), 0.0) as request:
        request.finished(1, FinishReason.STOP, 5)
    assert (ended(metrics, "stop"), ended(metrics, "abort")) == (1, 2)
    with pytest.raises(ApiError), metrics.request(prepared_call(n=2), 0.0):
        raise ApiError(500, "no")
    assert (ended(metrics, "abort"), ended(metrics, "error")) == (2, 2)
    with metrics.request(prepared_call(n=1), 0.0) as request:
        request.failed()
    assert ended(metrics, "error") == 3
    for left in (ClientGone, asyncio.CancelledError):
        with pytest.raises(left), metrics.request(prepared_call(n=1), 0.0):
            raise left
    assert (ended(metrics, "abort"), ended(metrics, "error")) == (4, 3)
