"""The gateways side by side, and beside them whether the numbers can be trusted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich import box
from rich.table import Table

from loadtest.fleet.runs import Row

COLUMNS = (
    ("hit ratio", "hit_ratio", 3),
    ("TTFT mean", "ttft_mean_s", 3),
    ("p50", "ttft_p50_s", 3),
    ("p90", "ttft_p90_s", 3),
    ("p99", "ttft_p99_s", 2),
    ("within", "within_objective", 3),
    ("imbalance", "imbalance", 2),
    ("busy", "utilization", 2),
)
SPREAD = ("hit_ratio", "ttft_mean_s", "ttft_p90_s")
MOST_LAG = 0.1  # of the mean TTFT, at the 99th percentile
MOST_CPU = 0.8  # of a core, for a process of one


def table(rows: Sequence[Row], title: str) -> Table:
    """A line a gateway, over all its runs."""
    num_runs = max(sum(other.gateway == row.gateway for other in rows) for row in rows)
    spread = f", mean ± deviation of {num_runs} runs" if num_runs > 1 else ""
    shown = Table(box=box.SIMPLE_HEAD, title=f"{title}{spread} (seconds of the trace)")
    shown.add_column("gateway")
    for heading, _, _ in COLUMNS:
        shown.add_column(heading, justify="right")
    for heading in ("TPOT ms", "failed", "lag p99", "send lag p99", "CPU gateway / fakes / clients"):
        shown.add_column(heading, justify="right")
    for name in dict.fromkeys(row.gateway for row in rows):
        runs = [row for row in rows if row.gateway == name]
        cells = [name]
        for _, key, digits in COLUMNS:
            values = [getattr(run, key) for run in runs]
            cell = f"{fmean(values):.{digits}f}"
            if len(values) > 1 and key in SPREAD:
                cell += f" ±{stdev(values):.{digits}f}"
            cells.append(cell)
        cells.append(f"{1000 * fmean(run.tpot_mean_s for run in runs):.1f}")
        cells.append(f"{sum(run.num_failed for run in runs)}/{sum(run.num_requests for run in runs)}")
        cells += [_most(runs, "lag_p99_s"), _most(runs, "send_lag_p99_s"), _cpu(runs)]
        shown.add_row(*cells)
    return shown


def _most(runs: Sequence[Row], name: str) -> str:
    values = [run.lag[name] for run in runs if name in run.lag]
    return f"{max(values):.3f}" if values else ""


def _cpu(runs: Sequence[Row]) -> str:
    told = [run.cpu for run in runs if run.cpu]
    if not told:
        return ""
    return " / ".join(f"{fmean(cpu.get(who, 0.0) for cpu in told):.2f}" for who in ("gateway", "fakes", "clients"))


def doubts(rows: Sequence[Row]) -> list[str]:
    """Why a run should not be believed, in sentences."""
    found = []
    num_cores = os.cpu_count() or 1
    if (busy := max(row.load_average for row in rows)) > num_cores:
        found.append(f"the machine had {busy:.1f} processes wanting its {num_cores} cores: gateways may have starved")
    for row in rows:
        for name, what in (("lag_p99_s", "the fakes' events"), ("send_lag_p99_s", "the clients' requests")):
            late = row.lag.get(name, 0.0)
            if late > MOST_LAG * row.ttft_mean_s:
                found.append(
                    f"{row.gateway}, seed {row.seed}: {what} were {late:.3f} s late at the 99th percentile, against "
                    f"{row.ttft_mean_s:.3f} s to the first token; lower --speedup or free the machine"
                )
        for who in ("fakes", "clients"):
            if row.cpu.get(who, 0.0) > MOST_CPU:
                found.append(
                    f"{row.gateway}, seed {row.seed}: the {who} kept {row.cpu[who]:.2f} cores busy; lower --speedup"
                )
        if row.errors:
            found.append(f"{row.gateway}, seed {row.seed}: {row.num_failed} requests failed; one said: {row.errors[0]}")
    return found


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.object() for row in rows], indent=1) + "\n", "utf-8")
