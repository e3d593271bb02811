"""What /metrics exports, under the prefix `warmgate_`. Counters and histograms move as requests end; gauges are read
from the fleet's state at the moment of the scrape, so they can't drift from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.record import EndState, RequestRecord
from policies.types import ReplicaStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Metric = TypeVar("_Metric", Counter, Histogram)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0)
_ROUTE_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class ReplicaGauges:
    """One replica at scrape time. `kv_feed` says how its cache contents are known: events, approximate or none."""

    replica_id: str
    status: ReplicaStatus
    num_waiting: int
    num_running: int
    queued_prefill_tokens: int
    kv_usage: float
    num_index_blocks: int
    key_mode: str
    kv_feed: str


@dataclass(frozen=True, slots=True)
class FleetGauges:
    replicas: tuple[ReplicaGauges, ...] = ()
    num_queued: int = 0
    num_in_flight: int = 0


class Metrics:
    """All of the gateway's metrics in a registry of their own. `gauges` is called at each scrape."""

    def __init__(self, gauges: Callable[[], FleetGauges]) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests ended.", "endpoint", "model", "status", "end")
        self._ttft = self._histogram("ttft_seconds", "Arrival to first token.", _SECONDS, "model")
        self._duration = self._histogram("request_seconds", "Arrival to the end of the answer.", _SECONDS, "model")
        self.itl = self._histogram("itl_seconds", "Between two chunks of a stream.", _SHORT_SECONDS)
        self._queue_wait = self._histogram("queue_wait_seconds", "Arrival to dispatch.", _ROUTE_SECONDS)
        self.route = self._histogram("route_seconds", "Computing one decision.", _ROUTE_SECONDS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.", "model")
        self._output_tokens = self._counter("output_tokens", "Output tokens of answered requests.", "model")
        self._matched = self._counter("matched_tokens", "Cached tokens that the router expected.", "model")
        self._cached = self._counter("cached_tokens", "Cached tokens that replicas reported.", "model")
        self._decisions = self._counter("decisions", "Routing decisions.", "policy", "reason")
        self._failovers = self._counter("failovers", "Attempts given up before the first token.", "kind")
        self._restarts = self._counter("replica_restarts", "Replicas that came back empty.", "replica")
        self._parity = self._counter("parity_mismatches", "Replicas that tokenize otherwise.", "replica")
        self.registry.register(_GaugeCollector(gauges))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def decided(self, policy: str, reason: str) -> None:
        _child(self._decisions, policy, reason).inc()

    def failed_over(self, kind: str) -> None:
        self._failovers.labels(kind).inc()

    def replica_restarted(self, replica_id: str) -> None:
        self._restarts.labels(replica_id).inc()

    def parity_mismatch(self, replica_id: str) -> None:
        self._parity.labels(replica_id).inc()

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has reached its end state. `record.model` is a served model's name or empty."""
        assert record.end is not None
        assert record.ended_at is not None
        model = record.model
        _child(self._requests, record.endpoint, model, str(record.status), record.end.value).inc()
        if record.placed_at is not None:
            self._queue_wait.observe(record.placed_at - record.started_at)
        if (ttft_s := record.ttft_s) is not None:
            _child(self._ttft, model).observe(ttft_s)
        if record.end is not EndState.COMPLETED:
            return
        _child(self._duration, model).observe(record.ended_at - record.started_at)
        for counter, value in (
            (self._prompt_tokens, record.prompt_tokens),
            (self._output_tokens, record.output_tokens),
            (self._matched, record.matched_tokens),
            (self._cached, record.cached_tokens),
        ):
            if value:
                _child(counter, model).inc(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"warmgate_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"warmgate_{name}", text, labels, buckets=buckets, registry=self.registry)


@functools.lru_cache(maxsize=4096)
def _child(metric: _Metric, *labels: str) -> _Metric:
    """`metric.labels(...)`, which formats and locks at each call."""
    return metric.labels(*labels)


class _GaugeCollector(Collector):
    def __init__(self, gauges: Callable[[], FleetGauges]) -> None:
        self._gauges = gauges

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        fleet = self._gauges()
        yield GaugeMetricFamily("warmgate_queue_depth", "Requests waiting in the gateway.", fleet.num_queued)
        yield GaugeMetricFamily("warmgate_in_flight", "Requests dispatched and not ended.", fleet.num_in_flight)
        states = GaugeMetricFamily("warmgate_replicas", "Replicas by state.", labels=["state"])
        for status in ReplicaStatus:
            states.add_metric([status.value], sum(replica.status is status for replica in fleet.replicas))
        yield states
        for name, text, read in _REPLICA_GAUGES:
            family = GaugeMetricFamily(f"warmgate_replica_{name}", text, labels=["replica"])
            for replica in fleet.replicas:
                family.add_metric([replica.replica_id], read(replica))
            yield family
        info = GaugeMetricFamily(
            "warmgate_replica_info", "How a replica's cache is known.", labels=["replica", "key_mode", "kv_feed"]
        )
        for replica in fleet.replicas:
            info.add_metric([replica.replica_id, replica.key_mode, replica.kv_feed], 1)
        yield info


_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[ReplicaGauges], float]], ...] = (
    ("up", "1 while the replica takes new requests.", lambda r: float(r.status is ReplicaStatus.READY)),
    ("in_flight", "Requests dispatched there and not ended.", lambda r: r.num_waiting + r.num_running),
    ("waiting", "Requests dispatched there without a first token.", lambda r: r.num_waiting),
    ("queued_prefill_tokens", "Uncached prompt tokens waiting there.", lambda r: r.queued_prefill_tokens),
    ("kv_usage", "Share of KV blocks that running requests hold.", lambda r: r.kv_usage),
    ("index_blocks", "Blocks that the router believes cached there.", lambda r: r.num_index_blocks),
)
