"""What metrics and health say about sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class SharingFigures:
    """`state`: shared or local (with `detail` why). Counts since the start.

    num_peers, num_remote_leases   other gateways heard lately, and their requests in flight
    num_published, num_applied     items sent, and events of others applied
    num_dropped                    own events that could not be sent
    num_gaps                       holes in what peers sent; each is made good by a list of their leases
    num_failed_calls               calls of Redis that failed or took too long
    num_recalled_blocks            blocks known from snapshots of the index
    """

    state: str
    detail: str
    gateway_id: str
    num_peers: int
    num_remote_leases: int
    num_published: int
    num_applied: int
    num_dropped: int
    num_gaps: int
    num_failed_calls: int
    num_recalled_blocks: int

    def for_health(self) -> dict[str, object]:
        return asdict(self)


class SharingCollector(Collector):
    """`figures` is called at each scrape."""

    def __init__(self, figures: Callable[[], SharingFigures]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        up = float(figures.state == "shared")
        yield GaugeMetricFamily("warmgate_sharing_up", "1 while knowledge is shared with other gateways.", up)
        yield GaugeMetricFamily("warmgate_sharing_peers", "Other gateways heard lately.", figures.num_peers)
        yield GaugeMetricFamily("warmgate_sharing_remote_leases", "Their requests.", figures.num_remote_leases)
        for name, text, value in (
            ("published", "Items sent to other gateways.", figures.num_published),
            ("applied", "Events of other gateways applied.", figures.num_applied),
            ("dropped", "Own events that could not be sent.", figures.num_dropped),
            ("gaps", "Holes in what other gateways sent.", figures.num_gaps),
            ("failed_calls", "Calls of Redis that failed or took too long.", figures.num_failed_calls),
            ("recalled_blocks", "Blocks known from snapshots of the index.", figures.num_recalled_blocks),
        ):
            yield CounterMetricFamily(f"warmgate_sharing_{name}", text, value)
