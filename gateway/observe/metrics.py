"""What /metrics exports, under the prefix `warmgate_`. Counters and histograms move as requests end; gauges are read
from the fleet's state at the moment of the scrape, so they can't drift from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.histogram import Buckets
from gateway.observe.record import EndState, RequestRecord
from policies.types import ReplicaStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
    breaker_open: bool = False


@dataclass(frozen=True, slots=True)
class FleetGauges:
    replicas: tuple[ReplicaGauges, ...] = ()
    num_queued: int = 0
    num_in_flight: int = 0
    num_tasks: int = 0


@dataclass(slots=True, eq=False)
class _ModelFigures:
    """What is kept for each model."""

    ttft: Buckets = field(default_factory=lambda: Buckets(_SECONDS))
    duration: Buckets = field(default_factory=lambda: Buckets(_SECONDS))
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_matched_tokens: int = 0
    num_cached_tokens: int = 0


class Metrics:
    """All of the gateway's metrics in a registry of their own. `gauges` is called at each scrape.

    itl, route, queue_wait, loop_lag   to be observed from outside, in seconds
    num_stream_pauses                  to be set from outside: how many there have been
    """

    def __init__(self, gauges: Callable[[], FleetGauges]) -> None:
        self.registry = CollectorRegistry()
        self.itl = Buckets(_SHORT_SECONDS)
        self.route = Buckets(_ROUTE_SECONDS)
        self.queue_wait = Buckets(_ROUTE_SECONDS)
        self.loop_lag = Buckets(_ROUTE_SECONDS)
        self.num_stream_pauses: Callable[[], int] = lambda: 0
        self._requests: Counter[tuple[str, str, int, EndState]] = Counter()
        self._decisions: Counter[tuple[str, ...]] = Counter()
        self._failovers: Counter[tuple[str, ...]] = Counter()
        self._resumes: Counter[tuple[str, ...]] = Counter()
        self._restarts: Counter[tuple[str, ...]] = Counter()
        self._parity: Counter[tuple[str, ...]] = Counter()
        self._models: defaultdict[str, _ModelFigures] = defaultdict(_ModelFigures)
        self.registry.register(_CountCollector(self._counts))
        self.registry.register(_GaugeCollector(gauges))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def decided(self, policy: str, reason: str) -> None:
        self._decisions[policy, reason] += 1

    def failed_over(self, kind: str, replica_id: str) -> None:
        """`replica_id` is where the attempt failed."""
        self._failovers[kind, replica_id] += 1

    def resumed(self, kind: str, outcome: str) -> None:
        """`outcome`: resumed (another replica goes on), or given_up."""
        self._resumes[kind, outcome] += 1

    def replica_restarted(self, replica_id: str) -> None:
        self._restarts[replica_id,] += 1

    def parity_mismatch(self, replica_id: str) -> None:
        self._parity[replica_id,] += 1

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has reached its end state. `record.model` is a served model's name or empty."""
        assert record.end is not None
        assert record.ended_at is not None
        self._requests[record.endpoint, record.model, record.status, record.end] += 1
        if record.placed_at is not None:
            self.queue_wait.observe(record.placed_at - record.started_at)
        figures = self._models[record.model]
        if record.first_token_at is not None:
            figures.ttft.observe(record.first_token_at - record.started_at)
        if record.end is not EndState.COMPLETED:
            return
        figures.duration.observe(record.ended_at - record.started_at)
        figures.num_prompt_tokens += record.prompt_tokens or 0
        figures.num_output_tokens += record.output_tokens or 0
        figures.num_matched_tokens += record.matched_tokens or 0
        figures.num_cached_tokens += record.cached_tokens or 0

    def _counts(self) -> Iterable[Metric]:
        labels = ("endpoint", "model", "status", "end")
        requests = {
            (route, model, str(status), end.value): n for (route, model, status, end), n in self._requests.items()
        }
        yield _counter("requests", "Requests ended.", labels, requests)
        models = self._models.items()
        for name, text, read in _MODEL_HISTOGRAMS:
            yield _histogram(name, text, {(model,): read(figures) for model, figures in models}, ("model",))
        yield _histogram("itl_seconds", "Between two reads of a stream.", {(): self.itl})
        text = "Reads of streams put off, so that their pieces join."
        yield _counter("stream_pauses", text, (), {(): self.num_stream_pauses()})
        yield _histogram("queue_wait_seconds", "Arrival to dispatch.", {(): self.queue_wait})
        yield _histogram("loop_lag_seconds", "How late the event loop runs its timers.", {(): self.loop_lag})
        yield _histogram("route_seconds", "Computing one decision.", {(): self.route})
        for name, text, count in _MODEL_COUNTERS:
            yield _counter(name, text, ("model",), {(model,): count(figures) for model, figures in models})
        yield _counter("decisions", "Routing decisions.", ("policy", "reason"), self._decisions)
        yield _counter("failovers", "Attempts given up before the first token.", ("kind", "replica"), self._failovers)
        yield _counter("resumes", "Streams that broke and could be continued.", ("kind", "outcome"), self._resumes)
        yield _counter("replica_restarts", "Replicas that came back empty.", ("replica",), self._restarts)
        yield _counter("parity_mismatches", "Replicas that tokenize otherwise.", ("replica",), self._parity)


_MODEL_HISTOGRAMS: tuple[tuple[str, str, Callable[[_ModelFigures], Buckets]], ...] = (
    ("ttft_seconds", "Arrival to first token.", lambda m: m.ttft),
    ("request_seconds", "Arrival to the end of the answer.", lambda m: m.duration),
)
_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[_ModelFigures], int]], ...] = (
    ("prompt_tokens", "Prompt tokens of answered requests.", lambda m: m.num_prompt_tokens),
    ("output_tokens", "Output tokens of answered requests.", lambda m: m.num_output_tokens),
    ("matched_tokens", "Cached tokens that the router expected.", lambda m: m.num_matched_tokens),
    ("cached_tokens", "Cached tokens that replicas reported.", lambda m: m.num_cached_tokens),
)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"warmgate_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(
    name: str, text: str, values: dict[tuple[str, ...], Buckets], labels: tuple[str, ...] = ()
) -> Metric:  # fmt: skip
    family = HistogramMetricFamily(f"warmgate_{name}", text, labels=labels)
    for key, buckets in values.items():
        family.add_metric(key, buckets.cumulative(), buckets.total)
    return family


class _CountCollector(Collector):
    def __init__(self, counts: Callable[[], Iterable[Metric]]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._counts()


class _GaugeCollector(Collector):
    def __init__(self, gauges: Callable[[], FleetGauges]) -> None:
        self._gauges = gauges

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        fleet = self._gauges()
        yield GaugeMetricFamily("warmgate_queue_depth", "Requests waiting in the gateway.", fleet.num_queued)
        yield GaugeMetricFamily("warmgate_in_flight", "Requests dispatched and not ended.", fleet.num_in_flight)
        yield GaugeMetricFamily(
            "warmgate_tasks", "Tasks on the event loop; as many as ever when idle.", fleet.num_tasks
        )
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
    ("breaker_open", "1 while it gets no traffic but trials.", lambda r: float(r.breaker_open)),
    ("index_blocks", "Blocks that the router believes cached there.", lambda r: r.num_index_blocks),
)
