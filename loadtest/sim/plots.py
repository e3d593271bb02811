"""Pictures of a comparison: TTFT and goodput against load, hit ratio against its bounds, load over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from loadtest.sim.pooled import NAME as POOLED
from loadtest.sim.report import Line, bounds_of, lines, load_words
from loadtest.sim.runs import Outcome
from loadtest.sim.series import Series

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes


def draw(folder: Path, outcomes: Sequence[Outcome], title: str, label_name: str) -> list[Path]:
    """Writes the pictures that there is data for, and says which."""
    folder.mkdir(parents=True, exist_ok=True)
    found = lines(outcomes)
    written = [_hit_ratio(folder / "hit_ratio.png", found, outcomes, title)]
    written.append(_against_load(folder / "ttft_by_load.png", found, title, label_name, "ttft_mean_s", "TTFT mean (s)"))
    written.append(
        _against_load(folder / "within_by_load.png", found, title, label_name, "within_objective", "within objective")
    )
    written += _over_time(folder, outcomes, title, label_name)
    return written


def _style(policy: str) -> dict[str, Any]:
    """The pooled limit stands out; everybody else has a colour by turn."""
    return {"color": "black", "linestyle": "--", "linewidth": 2} if policy == POOLED else {}


def _against_load(path: Path, found: Sequence[Line], title: str, label_name: str, name: str, heading: str) -> Path:
    _, axes = pyplot.subplots(figsize=(9, 6))
    for policy in dict.fromkeys(line.policy for line in found):
        own = [line for line in found if line.policy == policy]
        places, values = [line.label for line in own], [line.mean(name) for line in own]
        spreads = [line.spread(name) for line in own]
        axes.errorbar(places, values, yerr=spreads, marker="o", capsize=3, label=policy, **_style(policy))
    if name.startswith("ttft"):
        axes.set_yscale("log")
    axes.set_xlabel(label_name)
    axes.set_ylabel(heading)
    return _finish(path, axes, title)


def _hit_ratio(path: Path, found: Sequence[Line], outcomes: Sequence[Outcome], title: str) -> Path:
    """Bars at the greatest load, and the bounds as lines."""
    label = max(line.label for line in found)
    own = [line for line in found if line.label == label]
    _, axes = pyplot.subplots(figsize=(9, 6))
    axes.barh([line.policy for line in own], [line.mean("hit_ratio") for line in own], color="#5b8db8")
    axes.invert_yaxis()
    limits = bounds_of(outcomes).get(label)
    if limits is not None:
        for name, value, style in (
            ("infinite cache", limits.infinite, ":"),
            ("one LRU of all blocks", limits.lru, "--"),
            ("Belady on all blocks", limits.belady, "-."),
        ):
            axes.axvline(value, linestyle=style, color="black", label=f"{name} {value:.3f}")
    axes.set_xlabel("hit ratio (tokens)")
    return _finish(path, axes, title)


def _over_time(folder: Path, outcomes: Sequence[Outcome], title: str, label_name: str) -> list[Path]:
    written = []
    for outcome in outcomes:
        if outcome.series is None:
            continue
        name = f"load_{outcome.task.policy}_{outcome.task.label:g}.png"
        heading = f"{title}, {load_words(label_name, outcome.task.label)}, {outcome.task.policy}"
        written.append(_replicas(folder / name, outcome.series, heading))
    return written


def _replicas(path: Path, data: Series, title: str) -> Path:
    _, axes = pyplot.subplots(figsize=(9, 5))
    moments = [index * data.bin_s for index in range(len(data.ttft_s))]
    for index, row in enumerate(data.in_flight):
        axes.plot(moments, row, linewidth=0.8, label=f"replica {index}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests in flight on each replica")
    return _finish(path, axes, title, legend=len(data.in_flight) <= 16)


def _finish(path: Path, axes: Axes, title: str, legend: bool = True) -> Path:
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    figure = axes.figure
    figure.tight_layout()  # type: ignore[union-attr]
    figure.savefig(path, dpi=120)  # type: ignore[union-attr]
    pyplot.close(figure)  # type: ignore[arg-type]
    return path
