"""Results for people and for other programs: a table, the bounds beside it, and a list of JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.sim.bounds import Bounds
from loadtest.sim.figures import Figures
from loadtest.sim.pooled import NAME as POOLED
from loadtest.sim.runs import Outcome
from loadtest.sim.setup import Setup

BASELINE = "least_loaded"
OWN_PACE = "the trace's own pace"  # the name of a load that has no number
COLUMNS = (
    ("hit ratio", "hit_ratio", 3),
    ("TTFT mean", "ttft_mean_s", 3),
    ("p50", "ttft_p50_s", 3),
    ("p90", "ttft_p90_s", 3),
    ("p99", "ttft_p99_s", 2),
    ("within", "within_objective", 3),
    ("TPOT ms", "tpot_mean_s", 1),
    ("imbalance", "imbalance", 2),
)

NOISE = 0.02  # of the baseline's mean TTFT: two runs that differ in chance alone may differ by so much
SPREAD = ("hit_ratio", "ttft_mean_s", "within_objective")  # whose deviation over seeds is shown


@dataclass(frozen=True, slots=True)
class Line:
    """One policy at one load, over all seeds."""

    policy: str
    label: float
    runs: tuple[Figures, ...]

    def mean(self, name: str) -> float:
        return fmean(getattr(run, name) for run in self.runs)

    def spread(self, name: str) -> float:
        """Standard deviation over seeds; 0 with one."""
        values = [getattr(run, name) for run in self.runs]
        return stdev(values) if len(values) > 1 else 0.0


def lines(outcomes: Iterable[Outcome]) -> list[Line]:
    """Grouped by load and policy, in the order in which they first came, loads ascending."""
    groups: dict[tuple[float, str], list[Figures]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task.label, outcome.task.policy), []).append(outcome.figures)
    found = [
        Line(policy, label, tuple(sorted(runs, key=lambda run: run.seed))) for (label, policy), runs in groups.items()
    ]
    return sorted(found, key=lambda line: line.label)


def gap_closed(line: Line, baseline: Line, pooled: Line) -> float | None:
    """How much of the way in mean TTFT from `baseline` to the pooled limit; None where there is no way to go to speak
    of."""
    way = baseline.mean("ttft_mean_s") - pooled.mean("ttft_mean_s")
    return (
        (baseline.mean("ttft_mean_s") - line.mean("ttft_mean_s")) / way
        if way > NOISE * baseline.mean("ttft_mean_s")
        else None
    )


def bounds_of(outcomes: Iterable[Outcome]) -> dict[float, Bounds]:
    """The bounds of each load."""
    return {outcome.task.label: outcome.bounds for outcome in outcomes if outcome.bounds is not None}


def show(console: Console, outcomes: Sequence[Outcome], title: str, label_name: str) -> None:
    """A table for each load with its bounds under it."""
    limits = bounds_of(outcomes)
    grouped: dict[float, list[Line]] = {}
    for line in lines(outcomes):
        grouped.setdefault(line.label, []).append(line)
    for label, group in grouped.items():
        name = f"{title}, {load_words(label_name, label)}"
        console.print(_table(name, group))
        if label in limits:
            console.print(describe(limits[label], group))


def assumptions(setup: Setup) -> str:
    """What the figures hold for."""
    blocks = sorted(set(setup.fleet.num_blocks))
    size = f"{blocks[0]}" if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
    objective = setup.objective
    return (
        f"assumed: a model like Llama-3-8B in bf16 on one GPU a replica, with {size} KV blocks of the trace's size; "
        f"within: the first token at most {objective.ttft_s:g} s later than its cold prefill takes alone, then at most "
        f"{objective.tpot_s:g} s a token (--ttft-objective, --tpot-objective)"
    )


def load_words(label_name: str, label: float) -> str:
    return label_name if label_name == OWN_PACE else f"{label_name} {label:g}"


def describe(limits: Bounds, group: Sequence[Line]) -> str:
    """The bounds in words, with the pooled simulation's seconds where it ran."""
    text = (
        f"bounds on the hit ratio: {limits.infinite:.3f} with an infinite cache, {limits.lru:.3f} with one LRU of all "
        f"blocks, {limits.belady:.3f} with Belady's choice"
    )
    for line in group:
        if line.policy == POOLED:
            text += f"; on TTFT: {line.mean('ttft_mean_s'):.3f} s, one shared cache and shortest work first"
    return text


def _table(title: str, group: Sequence[Line]) -> Table:
    seeds = max(len(line.runs) for line in group)
    spread = f", mean ± deviation of {seeds} seeds" if seeds > 1 else ""
    table = Table(box=box.SIMPLE_HEAD, title=f"{title}{spread} (seconds)")
    table.add_column("policy")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    by_policy = {line.policy: line for line in group}
    baseline, pooled = by_policy.get(BASELINE), by_policy.get(POOLED)
    if baseline is not None and pooled is not None:
        table.add_column("gap closed", justify="right")
    table.add_column("failed", justify="right")
    for line in group:
        cells = [line.policy]
        for _, name, digits in COLUMNS:
            scale = 1000 if name == "tpot_mean_s" else 1
            cell = f"{line.mean(name) * scale:.{digits}f}"
            if seeds > 1 and name in SPREAD:
                cell += f" ±{line.spread(name) * scale:.{digits}f}"
            cells.append(cell)
        if baseline is not None and pooled is not None:
            gap = gap_closed(line, baseline, pooled)
            cells.append("-" if gap is None else f"{100 * gap:.0f} %")
        num_failed = sum(run.num_failed for run in line.runs)
        num_refused = sum(run.num_refused for run in line.runs)
        cells.append(f"{num_failed}" + (f" (+{num_refused} refused)" if num_refused else ""))
        table.add_row(*cells)
    return table


def objects(outcomes: Sequence[Outcome], label_name: str) -> list[dict[str, Any]]:
    """One JSON object a run: the figures, the load it stands for, the bounds of that load."""
    limits = bounds_of(outcomes)
    found = []
    for outcome in sorted(outcomes, key=lambda o: (o.task.label, o.task.policy, o.task.seed)):
        row = outcome.figures.row()
        row["load_kind"], row["load"] = label_name, outcome.task.label
        row["trace"] = outcome.task.setup.trace.name
        bound = limits.get(outcome.task.label)
        if bound is not None:
            row["bound_infinite_hit_ratio"] = bound.infinite
            row["bound_lru_hit_ratio"] = bound.lru
            row["bound_belady_hit_ratio"] = bound.belady
        found.append(row)
    return found


def check_json(path: Path | None) -> None:
    """Before the work, not after it. Raises ValueError where `--json` can't be written as a file."""
    if path is not None and path.is_dir():
        raise ValueError(f"--json {path} is a folder: name a file in it")


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
