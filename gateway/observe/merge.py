"""The metrics of several processes as those of one. No I/O.

Counters and histograms add up. Gauges of what a process itself has (requests in flight, waiting) add up, too; the
others describe the fleet, which all of them see alike, and the greatest is taken.

A counter must not fall when a process dies, or whoever computes rates from it takes all that is left for new. So the
tally keeps what each process had last counted, by pid, and for those that are gone their sum.
"""

from __future__ import annotations

import re

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_ADDED_GAUGES = frozenset({"warmgate_in_flight", "warmgate_queue_depth"})
_ADDED_TYPES = frozenset({"counter", "histogram", "summary"})

_SUFFIX = re.compile("_(total|bucket|count|sum)$")

Figures = dict[str, float]  # a sample's name and labels -> its value


class Process(msgspec.Struct):
    pid: int
    counted: Figures


class Tally(msgspec.Struct):
    """`last` by the process's number: what it had counted when it was last asked. `gone`: the sum over dead ones."""

    last: dict[int, Process] = msgspec.field(default_factory=dict)
    gone: Figures = msgspec.field(default_factory=dict)


class _Merged(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return self._families


def merged(texts: dict[int, tuple[int, str]], tally: Tally) -> str:
    """One exposition of those of processes, by number: (pid, text). Updates `tally`, which may know more processes
    than answered now; their last counts stand."""
    families: dict[str, Metric] = {}
    values: Figures = {}
    for number, (pid, text) in sorted(texts.items()):
        counted: Figures = {}
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            is_added = family.type in _ADDED_TYPES
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = "\0".join([sample.name, *(f"{k}={v}" for k, v in sample.labels.items())])
                if is_added:
                    counted[key] = sample.value
                elif family.name in _ADDED_GAUGES:
                    values[key] = values.get(key, 0.0) + sample.value
                else:
                    values[key] = max(values.get(key, sample.value), sample.value)
        before = tally.last.get(number)
        if before is not None and before.pid != pid:
            _add(tally.gone, before.counted)
        tally.last[number] = Process(pid, counted)
    for counted in (tally.gone, *(process.counted for process in tally.last.values())):
        _add(values, counted)
    for key, value in values.items():
        name, *pairs = key.split("\0")
        known = families.get(name) or families.get(_SUFFIX.sub("", name))
        if known is not None:  # else a metric that no process has any more
            known.add_sample(name, dict(pair.split("=", 1) for pair in pairs), value)
    registry = CollectorRegistry()
    registry.register(_Merged(list(families.values())))
    return generate_latest(registry).decode()


def _add(to: Figures, figures: Figures) -> None:
    for key, value in figures.items():
        to[key] = to.get(key, 0.0) + value
