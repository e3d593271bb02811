"""/metrics under the names that vLLM exports, so that today's dashboards and other routers understand this worker.

Timestamps are taken where things happen (arrival in the API process, first step and first token in the engine, which
shares the machine's monotonic clock) and the metrics derived here. A client's cancel counts as `abort`, an error as
`error`; neither is a success of any other kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_worker.config import ModelInfo
from engine_worker.core.types import FinishReason
from engine_worker.serving.http import ClientGone
from engine_worker.serving.messages import Stats, Step, Update
from engine_worker.serving.prepare import PreparedCall
from engine_worker.serving.tally import Tally

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class WorkerMetrics(Collector):
    """All of one worker's metrics. Counters survive an engine's restart; what the engine counts itself is added up."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        names = tuple(self._labels)

        self._tallies: list[Tally] = []

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Tally:
            self._tallies.append(Tally(f"vllm:{name}", text, buckets))
            return self._tallies[-1]

        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "The KV cache's shape, as labels.",
            (*names, "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        self._success = Counter(
            "vllm:request_success", "Ended sequences by reason.", (*names, "finished_reason"), registry=self.registry
        )
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to the first step.", _LATENCY)
        self.prefill_time = histogram("request_prefill_time_seconds", "First step to first token.", _LATENCY)
        self.decode_time = histogram("request_decode_time_seconds", "First token to last.", _LATENCY)
        self.num_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.num_generated = histogram("request_generation_tokens", "Tokens made by a sequence.", _TOKENS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._past = Stats()  # of engines that are gone: only the growing counts are used
        self._stats = Stats()
        self.registry.register(self)

    def model_loaded(self, info: ModelInfo) -> None:
        self._cache_config.clear()
        self._cache_config.labels(
            **self._labels, block_size=str(info.block_size), num_gpu_blocks=str(info.num_blocks)
        ).set(1)

    def engine_lost(self) -> None:
        """A new engine counts from zero."""
        past, last = self._past, self._stats
        self._past = Stats(
            num_preemptions=past.num_preemptions + last.num_preemptions,
            prefix_cache_queries=past.prefix_cache_queries + last.prefix_cache_queries,
            prefix_cache_hits=past.prefix_cache_hits + last.prefix_cache_hits,
            num_drafts=past.num_drafts + last.num_drafts,
            num_draft_tokens=past.num_draft_tokens + last.num_draft_tokens,
            num_accepted_tokens=past.num_accepted_tokens + last.num_accepted_tokens,
        )
        self._stats = Stats()

    def step(self, step: Step) -> None:
        self._stats = step.stats
        if step.num_tokens:
            self._step_tokens.observe(step.num_tokens)

    def collect(self) -> Iterator[Metric]:
        """What is kept as numbers (prometheus_client calls this)."""
        stats, labels = self._stats, self._labels
        usage = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences waiting to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.", usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(labels))
            gauge.add_metric(tuple(labels.values()), value)
            yield gauge
        for tally in self._tallies:
            yield tally.family(labels)
        yield from self._counters()

    def _counters(self) -> Iterator[CounterMetricFamily]:
        stats, past = self._stats, self._past
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that reached their first token.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("num_preemptions", "Preemptions.", past.num_preemptions + stats.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                past.prefix_cache_queries + stats.prefix_cache_queries,
            ),
            (
                "prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                past.prefix_cache_hits + stats.prefix_cache_hits,
            ),
            ("spec_decode_num_drafts", "Speculations verified.", past.num_drafts + stats.num_drafts),
            (
                "spec_decode_num_draft_tokens",
                "Speculated tokens verified.",
                past.num_draft_tokens + stats.num_draft_tokens,
            ),
            (
                "spec_decode_num_accepted_tokens",
                "Speculated tokens that became output.",
                past.num_accepted_tokens + stats.num_accepted_tokens,
            ),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), value)
            yield family

    def ended(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    @contextmanager
    def request(self, prepared: PreparedCall, arrival_s: float) -> Iterator[RequestMetrics]:
        """Sequences that have not finished inside the block count as aborted, or as failed after an error."""
        metrics = RequestMetrics(self, prepared, arrival_s)
        try:
            yield metrics
        except ClientGone:
            raise
        except Exception:  # a cancelled task raises CancelledError, which is no Exception: its client has gone, too
            metrics.failed()
            raise
        finally:
            metrics.close()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class RequestMetrics:
    """Observes one API request. `arrival_s` is monotonic."""

    def __init__(self, worker: WorkerMetrics, prepared: PreparedCall, arrival_s: float) -> None:
        self._worker = worker
        self._prepared = prepared
        self._arrival_s = arrival_s
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._open = set(range(len(prepared.prompts) * prepared.n))
        self._reason = FinishReason.ABORT

    def token(self, index: int, update: Update) -> None:
        if update.token is None:
            return
        now = time.monotonic()
        worker = self._worker
        worker.generation_tokens += 1
        if index in self._first_s:
            worker.itl.observe(now - self._last_s[index])
        else:
            self._first_s[index] = now
            self._first_token(index, update, now)
        self._last_s[index] = now

    def _first_token(self, index: int, update: Update, now: float) -> None:
        worker = self._worker
        prompt, choice = divmod(index, self._prepared.n)
        if choice == 0:
            num_tokens = len(self._prepared.prompts[prompt])
            worker.prompt_tokens += num_tokens
            worker.num_prompt.observe(num_tokens)
        worker.ttft.observe(now - self._arrival_s)
        if update.queue_s is not None and update.prefill_s is not None:
            worker.queue_time.observe(update.queue_s)
            worker.prefill_time.observe(update.prefill_s)

    def finished(self, index: int, reason: FinishReason, num_tokens: int) -> None:
        now = time.monotonic()
        worker = self._worker
        self._open.discard(index)
        worker.ended(reason)
        worker.e2e.observe(now - self._arrival_s)
        worker.decode_time.observe(now - self._first_s.get(index, now))
        worker.num_generated.observe(num_tokens)

    def failed(self) -> None:
        """What has not finished has failed. Otherwise its client has gone, which is nobody's failure."""
        self._reason = FinishReason.ERROR

    def close(self) -> None:
        for _ in self._open:
            self._worker.ended(self._reason)
        self._open.clear()
