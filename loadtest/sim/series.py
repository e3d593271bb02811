"""Load over time, from the raw times of a run: for plots."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.sim.job import JobStatus
from loadtest.sim.simulation import Simulation

NUM_BINS = 100


@dataclass(frozen=True, slots=True)
class Series:
    """One value a bin. `in_flight`: for each replica, requests there on average; `ttft_s`: mean over requests that
    arrived in the bin (None: nobody did)."""

    bin_s: float
    in_flight: tuple[tuple[float, ...], ...]
    ttft_s: tuple[float | None, ...]


def series(run: Simulation, num_bins: int = NUM_BINS) -> Series:
    done = [job for job in run.jobs if job.status is JobStatus.DONE]
    end = max((job.finished_at or 0.0 for job in done), default=0.0)
    bin_s = max(end / num_bins, 1e-9)
    index = {replica.replica_id: replica.index for replica in run.replicas}
    busy = [[0.0] * num_bins for _ in run.replicas]
    sums, counts = [0.0] * num_bins, [0] * num_bins
    for job in done:
        assert job.replica_id is not None
        assert job.dispatched_at is not None
        assert job.finished_at is not None
        _spread(busy[index[job.replica_id]], job.dispatched_at, job.finished_at, bin_s)
        place = min(int(job.arrived_at / bin_s), num_bins - 1)
        sums[place] += job.ttft_s
        counts[place] += 1
    in_flight = tuple(tuple(value / bin_s for value in row) for row in busy)
    ttfts = tuple(total / count if count else None for total, count in zip(sums, counts, strict=True))
    return Series(bin_s, in_flight, ttfts)


def _spread(row: list[float], start: float, end: float, bin_s: float) -> None:
    """Adds the seconds of start..end to the bins they fall in."""
    first, last = int(start / bin_s), min(int(end / bin_s), len(row) - 1)
    for place in range(min(first, last), last + 1):
        row[place] += max(min(end, (place + 1) * bin_s) - max(start, place * bin_s), 0.0)
