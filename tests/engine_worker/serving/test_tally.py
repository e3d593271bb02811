"""Our histogram beside prometheus_client's own: what is exposed is the same to the letter."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine_worker.serving.tally import Tally

BOUNDS = (0.005, 0.1, 1, 10_000)

disable_created_metrics()  # type: ignore[no-untyped-call]


class Shown(Collector):
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        yield self._tally.family({"model_name": "m"})


@given(st.lists(st.floats(0, 20_000) | st.sampled_from(BOUNDS), max_size=20))
def test_what_is_exposed_is_what_prometheus_client_would(values: list[float]) -> None:
    tally = Tally("vllm:some_seconds", "Some time.", BOUNDS)
    registry, others = CollectorRegistry(), CollectorRegistry()
    registry.register(Shown(tally))
    other = Histogram("vllm:some_seconds", "Some time.", ("model_name",), registry=others, buckets=BOUNDS)
    labelled = other.labels(model_name="m")
    for value in values:
        tally.observe(value)
        labelled.observe(value)
    assert generate_latest(registry) == generate_latest(others)
