"""What metrics say of tenants. Their number is bounded: beyond MAX_TENANTS they are counted together, as `other`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.record import EndState, RequestRecord

MAX_TENANTS = 200
OTHER = "other"


class _Tenant:
    """One tenant's counts: requests by how they ended, tokens of those that were answered, refusals by limit."""

    __slots__ = ("denials", "num_cached", "num_output", "num_prompt", "requests")

    def __init__(self) -> None:
        self.requests: Counter[EndState] = Counter()
        self.denials: Counter[str] = Counter()
        self.num_prompt = 0
        self.num_cached = 0
        self.num_output = 0


class TenantFigures:
    """Counts since the start. `strangers`: requests without a good key; `num_local`: decided without Redis."""

    def __init__(self) -> None:
        self.strangers: Counter[str] = Counter()
        self.num_local = 0
        self._tenants: dict[str, _Tenant] = {}

    def _counts(self, tenant: str) -> _Tenant:
        counts = self._tenants.get(tenant)
        if counts is None:
            label = tenant if len(self._tenants) < MAX_TENANTS else OTHER
            counts = self._tenants.get(label)
            if counts is None:
                counts = self._tenants[label] = _Tenant()
        return counts

    def denied(self, tenant: str, limit: str) -> None:
        self._counts(tenant).denials[limit] += 1

    def ended(self, record: RequestRecord) -> None:
        """A request that was admitted has ended."""
        assert record.end is not None
        counts = self._counts(record.tenant)
        counts.requests[record.end] += 1
        if record.output_tokens is not None:
            cached = record.cached_tokens or 0
            counts.num_prompt += max(0, (record.prompt_tokens or 0) - cached)
            counts.num_cached += cached
            counts.num_output += record.output_tokens

    def families(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "warmgate_tenant_requests", "Requests admitted, by how they ended.", labels=["tenant", "end"]
        )
        tokens = CounterMetricFamily(
            "warmgate_tenant_tokens", "Tokens of answered requests; kind prompt: uncached.", labels=["tenant", "kind"]
        )
        denials = CounterMetricFamily(
            "warmgate_tenant_denials", "Requests refused by a limit.", labels=["tenant", "limit"]
        )
        for tenant, counts in self._tenants.items():
            for end, value in counts.requests.items():
                requests.add_metric([tenant, end.value], value)
            for kind, value in (
                ("prompt", counts.num_prompt), ("cached", counts.num_cached), ("output", counts.num_output),
            ):  # fmt: skip
                tokens.add_metric([tenant, kind], value)
            for limit, value in counts.denials.items():
                denials.add_metric([tenant, limit], value)
        yield from (requests, tokens, denials)
        strangers = CounterMetricFamily("warmgate_unauthenticated", "Requests without a good key.", labels=["key"])
        for reason, value in self.strangers.items():
            strangers.add_metric([reason], value)
        yield strangers
        yield CounterMetricFamily("warmgate_limits_local", "Limits decided without Redis.", self.num_local)


class TenantCollector(Collector):
    def __init__(self, figures: TenantFigures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._figures.families()
