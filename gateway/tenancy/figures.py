"""What metrics say of tenants. Their number is bounded: beyond MAX_TENANTS they are counted together, as `other`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.observe.record import RequestRecord

MAX_TENANTS = 200
OTHER = "other"


class TenantFigures:
    """Counts since the start. `strangers`: requests without a good key; `num_local`: decided without Redis."""

    def __init__(self) -> None:
        self.strangers: Counter[str] = Counter()
        self.num_local = 0
        self._tenants: dict[str, str] = {}
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._denied: Counter[tuple[str, str]] = Counter()

    def _label(self, tenant: str) -> str:
        label = self._tenants.get(tenant)
        if label is None:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER
            label = self._tenants[tenant] = tenant
        return label

    def denied(self, tenant: str, limit: str) -> None:
        self._denied[self._label(tenant), limit] += 1

    def ended(self, record: RequestRecord) -> None:
        """A request that was admitted has ended."""
        tenant = self._label(record.tenant)
        assert record.end is not None
        self._requests[tenant, record.end.value] += 1
        if record.output_tokens is not None:
            cached = record.cached_tokens or 0
            self._tokens[tenant, "prompt"] += max(0, (record.prompt_tokens or 0) - cached)
            self._tokens[tenant, "cached"] += cached
            self._tokens[tenant, "output"] += record.output_tokens

    def families(self) -> Iterable[Metric]:
        for name, text, labels, counts in (
            ("tenant_requests", "Requests admitted, by how they ended.", ("tenant", "end"), self._requests),
            (
                "tenant_tokens",
                "Tokens of answered requests; kind prompt: uncached.",
                ("tenant", "kind"),
                self._tokens,
            ),
            ("tenant_denials", "Requests refused by a limit.", ("tenant", "limit"), self._denied),
        ):
            family = CounterMetricFamily(f"warmgate_{name}", text, labels=labels)
            for key, value in counts.items():
                family.add_metric(key, value)
            yield family
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
