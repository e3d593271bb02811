"""One measurement: a fresh fake fleet, a gateway in front of it, the trace through both, and the figures of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest.ending import bound_to_us
from loadtest.fleet.driver import ChatSpeech, Driver, Replayed
from loadtest.fleet.gateways import Running, Upstream, cpu_seconds, kind_of, running_gateway
from loadtest.fleet.replica import Manner
from loadtest.fleet.text import Wording
from loadtest.fleet.wall import lag_row
from loadtest.sim.figures import figures, is_within, mean, percentile
from loadtest.sim.job import JobStatus
from loadtest.sim.prompts import PromptBook
from loadtest.sim.setup import Setup
from loadtest.sim.simulation import Simulation
from loadtest.sim.trace import Trace

MODEL = "fake"
SIM = "sim"


class FakesFailed(Exception):
    """The fleet's process didn't come up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all gateways get: `trace` as served, `setup` of the fleet and its load."""

    trace: Trace
    setup: Setup
    gpu: str
    wording: Wording
    speedup: float
    peers: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run's figures, in the trace's seconds. Names as in loadtest.sim.

    hit_ratio, imbalance  as the replicas counted it, whatever the gateway passed on
    lag                   how late the fakes' events and the clients' requests were
    cpu                   cores that gateway, fakes and clients kept busy
    load_average          processes that ran or wanted to, on the whole machine, in the last minute of the run
    """

    gateway: str
    seed: int
    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    within_objective: float
    imbalance: float
    tpot_mean_s: float
    num_requests: int
    num_failed: int
    rate: float
    duration_s: float
    utilization: float
    speedup: float = 0.0
    compress: int = 0
    lag: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    load_average: float = 0.0
    errors: list[str] = field(default_factory=list)

    def object(self) -> dict[str, Any]:
        return asdict(self)


def run(plan: Plan, name: str, seed: int, progress: Callable[[int], None] | None = None) -> Row:
    """Raises GatewayFailed, FakesFailed, and ValueError for an unknown name."""
    if name.partition(":")[0] == SIM:
        return simulated(plan, name, seed)
    with (
        running_fakes(plan, kind_of(name).manner) as (upstreams, fakes_pid),
        running_gateway(name, upstreams, MODEL, plan.wording.block_words, plan.peers) as gateway,
    ):
        return measure(plan, name, seed, upstreams, fakes_pid, gateway, progress)


def simulated(plan: Plan, name: str, seed: int) -> Row:
    """The same in the simulator: what the run should give were there no network, no polls and no process."""
    simulation = Simulation(plan.setup, plan.trace, PromptBook(), name.partition(":")[2] or "warm", seed)
    simulation.run()
    row = figures(simulation, name, seed).row()
    shared = {key: row[key] for key in Row.__dataclass_fields__ if key in row}
    return Row(gateway=name, **shared)


def fakes_arguments(plan: Plan, manner: Manner) -> list[str]:
    """For the fleet's process."""
    fleet, wording = plan.setup.fleet, plan.wording
    return [
        *("--replicas", str(fleet.size), "--gpu", plan.gpu, "--blocks", *map(str, fleet.num_blocks)),
        *("--block-tokens", str(wording.block_tokens), "--compress", str(wording.compress)),
        *("--speedup", str(plan.speedup), "--manner", manner, "--model", MODEL),
        *("--token-budget", str(fleet.token_budget), "--max-num-seqs", str(fleet.max_num_seqs)),
        *("--joint-prefill-tokens", str(fleet.joint_prefill_tokens)),
    ]


@contextlib.contextmanager
def running_fakes(plan: Plan, manner: Manner) -> Iterator[tuple[list[Upstream], int]]:
    """A fleet with empty caches, and its process. Raises FakesFailed."""
    command = [sys.executable, "-m", "loadtest.fleet.fakes", *fakes_arguments(plan, manner)]
    process = subprocess.Popen(bound_to_us(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise FakesFailed("the fake fleet did not come up; what it said is above")
        yield [Upstream(**each) for each in json.loads(line)], process.pid
    finally:
        process.stdin.close()  # its sign to end
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def measure(
    plan: Plan, name: str, seed: int, upstreams: Sequence[Upstream], fakes_pid: int, gateway: Running,
    progress: Callable[[int], None] | None,
) -> Row:  # fmt: skip
    """The run itself, in front of a fleet that is up."""
    pids = {"gateway": gateway.pids, "fakes": (fakes_pid,), "clients": (os.getpid(),)}
    before, cpu_before = _stats(upstreams), {who: cpu_seconds(each) for who, each in pids.items()}
    driver = Driver(
        gateway.base_urls, MODEL, plan.trace, plan.setup.load, ChatSpeech(plan.wording), plan.speedup, seed, progress
    )
    replayed = asyncio.run(driver.run())
    after, cpu_after = _stats(upstreams), {who: cpu_seconds(each) for who, each in pids.items()}
    wall_s = (after[0]["now_s"] - before[0]["now_s"]) / plan.speedup
    cpu = {
        who: (used - cpu_before[who]) / wall_s  # type: ignore[operator]
        for who, used in cpu_after.items()
        if used is not None and cpu_before[who] is not None
    }
    lag = {**after[0]["lag"], **lag_row(replayed.lags_s, "send_lag")}
    return _row(plan, name, seed, replayed, before, after, lag, cpu)


def _stats(upstreams: Sequence[Upstream]) -> list[dict[str, Any]]:
    with httpx.Client(timeout=30.0, trust_env=False) as client:
        return [client.get(f"{each.url}/fake/stats").raise_for_status().json() for each in upstreams]


def _row(
    plan: Plan, name: str, seed: int, replayed: Replayed, before: list[dict[str, Any]], after: list[dict[str, Any]],
    lag: dict[str, float], cpu: dict[str, float],
) -> Row:  # fmt: skip
    jobs = replayed.jobs
    done = [job for job in jobs if job.status is JobStatus.DONE]
    failed = [job for job in jobs if job.status is JobStatus.FAILED]
    nothing = float("nan")
    ttfts = sorted(job.ttft_s for job in done) or [nothing]
    tpots = [job.tpot_s for job in done if job.trace.num_output_tokens > 1] or [nothing]
    grown = [{key: b[key] - a[key] for key in _COUNTED} for a, b in zip(before, after, strict=True)]
    computed = [each["prompt_tokens"] - each["cached_tokens"] for each in grown]
    looked_up = sum(each["prompt_tokens"] for each in grown)
    sent_s = jobs[-1].arrived_at - jobs[0].arrived_at if jobs else 0.0
    duration_s = after[0]["now_s"] - before[0]["now_s"]
    return Row(
        gateway=name,
        seed=seed,
        hit_ratio=sum(each["cached_tokens"] for each in grown) / looked_up if looked_up else nothing,
        ttft_mean_s=mean(ttfts),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        within_objective=sum(is_within(job, plan.setup) for job in done) / len(jobs) if jobs else nothing,
        imbalance=max(computed) * len(computed) / sum(computed) if sum(computed) else 1.0,
        tpot_mean_s=mean(tpots),
        num_requests=len(jobs),
        num_failed=len(failed),
        rate=len(jobs) / sent_s if sent_s else 0.0,
        duration_s=duration_s,
        utilization=sum(each["busy_s"] for each in grown) / (duration_s * len(grown)),
        speedup=plan.speedup,
        compress=plan.wording.compress,
        lag=lag,
        cpu=cpu,
        load_average=os.getloadavg()[0],
        errors=sorted({job.reason for job in failed})[:5],
    )


_COUNTED = ("prompt_tokens", "cached_tokens", "busy_s")
