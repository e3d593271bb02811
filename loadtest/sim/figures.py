"""Figures of a run, from the raw times of its requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.sim.job import Job, JobStatus
from loadtest.sim.setup import Setup
from loadtest.sim.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy, one seed. Requests that no replica could hold are left out everywhere but in `num_refused`.

    hit_ratio        prompt tokens found cached over prompt tokens
    within_objective share of requests served well (setup.Objective); failed ones were not
    imbalance        prefill tokens of the replica that computed most, over the mean
    rate             requests a second, over the time in which requests were sent
    """

    policy: str
    seed: int
    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    within_objective: float
    imbalance: float
    tpot_mean_s: float
    tpot_p90_s: float
    num_requests: int
    num_failed: int
    num_refused: int
    num_retries: int
    num_preemptions: int
    rate: float
    duration_s: float
    utilization: float
    num_events: int
    num_steps: int
    num_plans: int

    def row(self) -> dict[str, Any]:
        return asdict(self)


def figures(run: Simulation, policy: str, seed: int) -> Figures:
    """Raises ValueError when no request was answered at all."""
    setup = run.setup
    counted = [job for job in run.jobs if job.status in (JobStatus.DONE, JobStatus.FAILED)]
    done = [job for job in counted if job.status is JobStatus.DONE]
    if not done:
        raise ValueError("no request was answered: the replicas' caches are too small for this trace, or all died")
    ttfts = sorted(job.ttft_s for job in done)
    tpots = sorted(job.tpot_s for job in done if job.trace.num_output_tokens > 1) or [0.0]
    prompt_tokens = sum(job.trace.num_prompt_tokens for job in done)
    sent_s = run.jobs[-1].arrived_at - run.jobs[0].arrived_at
    end_s = max(job.finished_at or 0.0 for job in done)
    engines = [replica.engine for replica in run.replicas if replica.engine is not None]
    return Figures(
        policy=policy,
        seed=seed,
        hit_ratio=sum(job.cached_tokens for job in done) / prompt_tokens,
        ttft_mean_s=mean(ttfts),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        within_objective=sum(is_within(job, setup) for job in done) / len(counted),
        imbalance=imbalance(done, setup.fleet.size),
        tpot_mean_s=mean(tpots),
        tpot_p90_s=percentile(tpots, 90),
        num_requests=len(counted),
        num_failed=len(counted) - len(done),
        num_refused=sum(job.status is JobStatus.REFUSED for job in run.jobs),
        num_retries=run.num_retries,
        num_preemptions=sum(engine.scheduler.stats().num_preemptions for engine in engines),
        rate=len(run.jobs) / sent_s if sent_s else 0.0,
        duration_s=end_s,
        utilization=sum(engine.busy_s for engine in engines) / (end_s * len(engines)),
        num_events=run.clock.num_events,
        num_steps=sum(engine.num_steps for engine in engines),
        num_plans=sum(engine.num_plans for engine in engines),
    )


def is_within(job: Job, setup: Setup) -> bool:
    cold_s = setup.fleet.fastest.cold_prefill_s(job.trace.num_prompt_tokens, setup.fleet.token_budget)
    return job.ttft_s <= setup.objective.ttft_s + cold_s and job.tpot_s <= setup.objective.tpot_s


def imbalance(done: Sequence[Job], num_replicas: int) -> float:
    computed: dict[str, int] = defaultdict(int)
    for job in done:
        assert job.replica_id is not None
        computed[job.replica_id] += job.trace.num_prompt_tokens - job.cached_tokens
    total = sum(computed.values())
    return max(computed.values()) * num_replicas / total if total else 1.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of values in order."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
