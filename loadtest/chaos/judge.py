"""From tries, logs and states to the rows of targets. Pure but for reading the gateways' logs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.chaos.clients import Try
from loadtest.chaos.processes import Gateway
from loadtest.chaos.quiesce import Held, leftovers
from loadtest.chaos.verdict import Ending
from loadtest.chaos.watch import Watch
from loadtest.records import percentile

Lines = dict[str, list[dict[str, Any]]]
_UNWRITTEN_S = 2.0  # a killed gateway's log may lack what ended so shortly before
_MAX_SHOWN = 20
_AGREES = {Ending.COMPLETED: "completed", Ending.REJECTED: "rejected", Ending.FAILED: "failed"}


@dataclass(frozen=True, slots=True)
class Row:
    """`ok` is None where nothing was there to measure. Rows of `correctness` decide the exit status."""

    what: str
    target: str
    measured: str
    ok: bool | None
    correctness: bool
    value: float | None = None


def read_logs(gateways: Sequence[Gateway]) -> list[Lines]:
    """Each gateway's access log by request id. A line cut short by a kill is passed over."""
    logs = []
    for gateway in gateways:
        lines: Lines = defaultdict(list)
        for raw in gateway.access_log.read_bytes().splitlines() if gateway.access_log.exists() else ():
            try:
                line = msgspec.json.decode(raw)
                lines[line["request_id"]].append(line)
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
        logs.append(lines)
    return logs


def disagreements(tries: Sequence[Try], logs: Sequence[Lines]) -> list[str]:
    """Where a gateway's log says otherwise than its client saw."""
    found = []
    for each in tries:
        lines = logs[each.gateway.number].get(each.request_id, [])
        ends = [line["end"] for line in lines]
        if len(ends) > 1:
            found.append(f"{each.request_id} ended {len(ends)} times in the log: {ends}")
        if each.gateway.was_down(each.sent_at, each.ended_at + _UNWRITTEN_S):
            continue
        if (wanted := _AGREES.get(each.ending)) is not None and ends != [wanted]:
            found.append(f"{each.request_id} is {each.ending} to its client and {ends} in the log")
    return found


def attempts(logs: Sequence[Lines]) -> tuple[int, int]:
    """Attempts at replicas, and the requests that had any."""
    counts = [line["attempts"] for lines in logs for same in lines.values() for line in same if line["attempts"]]
    return sum(counts), len(counts)


def freed_s(tries: Sequence[Try], watch: Watch) -> list[float]:
    """From a client's leaving to the worker's letting go, where nothing was wrong with that worker then."""
    found = []
    for each in tries:
        if each.ending is Ending.LEFT and (ends := watch.ends.get(each.request_id)):
            _, at, worker = max(ends, key=lambda end: end[1])
            if at > each.ended_at and not watch.was_harmed(worker, each.sent_at, at):
                found.append(at - each.ended_at)
    return found


def rows(
    tries: Sequence[Try],
    watch: Watch,
    logs: Sequence[Lines],
    before: Held,
    after: Held | None,
    other_faults: Sequence[str],
) -> tuple[list[Row], list[str]]:
    """The table, and a sentence for each fault."""
    endings = Counter(each.ending for each in tries)
    streams = [each for each in tries if each.ending is Ending.COMPLETED and each.faults]
    others = [each for each in tries if each.ending is not Ending.COMPLETED and each.faults]
    unfinished = [each for each in tries if each.ending is Ending.UNFINISHED]
    differing = disagreements(tries, logs)
    num_answered = len(tries) - endings[Ending.GATEWAY_LOST] - endings[Ending.LEFT]
    num_attempts, num_routed = attempts(logs)
    left = leftovers(after, before) if after is not None else {}
    found = [
        _count("lost, doubled or reordered tokens in streams marked successful", streams),
        _count("wrong tokens before an error, or an error out of shape", others),
        _count("requests without a terminal state", unfinished),
        _count("requests whose end the gateway's log has otherwise, or twice", differing),
        _count("crashes, tracebacks, bad exits", other_faults),
        _ratio("errors before the first token", endings[Ending.REJECTED], num_answered, 0.001, percent=True),
        _ratio("attempts a request", num_attempts, num_routed, 1.2, percent=False),
        _slowest("new traffic avoids a killed worker", watch.avoided_s["killed"], 1.0, 1.0),
        _slowest("new traffic avoids a stopped worker", watch.avoided_s["stopped"], 10.0, 1.0),
        _slowest("a disconnect frees the worker's slot, p99", freed_s(tries, watch), 0.5, 0.99),
    ]
    for name, what, target in (
        ("slots", "slots held after quiesce", "0"),
        ("blocks", "KV blocks held after quiesce", "as before"),
        ("tasks", "tasks after quiesce", "as before"),
        ("fds", "file descriptors after quiesce", "within 5"),
    ):
        measured = left.get(name, target) if after is not None else "the gateways did not answer"
        found.append(Row(what, target, measured, after is not None and name not in left, True))
    resumed = [line for lines in logs for same in lines.values() for line in same if "resumed_from" in line]
    found.append(Row("streams that broke and went on elsewhere", "told only", str(len(resumed)), None, False))
    if after is not None:
        pairs = zip(before.gateways, after.gateways, strict=True)
        grown = ", ".join(f"{b.rss_bytes / 2**20:.0f} to {a.rss_bytes / 2**20:.0f} MiB" for b, a in pairs)
        found.append(Row("memory of the gateways", "told only", grown, None, False))
    return found, [*_sentences(streams + others + unfinished), *differing, *other_faults]


def _sentences(tries: Sequence[Try]) -> list[str]:
    distinct = list({id(each): each for each in tries}.values())
    return [
        f"{each.request_id} ({each.ask.path}, {'stream' if each.ask.stream else 'whole'}, {each.ask.habit}, gateway "
        f"{each.gateway.number}): {each.ending}, {'; '.join(each.faults) or each.detail}"
        for each in distinct
    ]


def _count(what: str, items: Sequence[object]) -> Row:
    return Row(what, "0", str(len(items)), not items, True, float(len(items)))


def _ratio(what: str, part: int, whole: int, most: float, percent: bool) -> Row:
    value = part / whole if whole else math.nan
    shown = f"{value:.3%} ({part} of {whole})" if percent else f"{value:.3f}"
    target = f"at most {most:.1%}" if percent else f"at most {most:g}"
    return Row(what, target, shown if whole else "-", value <= most if whole else None, False, value if whole else None)


def _slowest(what: str, seconds: Sequence[float], most: float, share: float) -> Row:
    if not seconds:
        return Row(what, f"{most:g} s", "nothing to measure", None, False)
    value = percentile(seconds, share)
    return Row(what, f"{most:g} s", f"{value:.3f} s (of {len(seconds)})", value <= most, False, value)
