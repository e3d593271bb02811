"""Whole runs on small traces: the same seed gives the same run, every request ends once, and troubles are survived."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.sim.figures import Figures, figures
from loadtest.sim.gpus import GPUS, parse_fleet
from loadtest.sim.job import JobStatus
from loadtest.sim.pooled import PooledSimulation
from loadtest.sim.prompts import PromptBook
from loadtest.sim.setup import Conditions, Fleet, Load, Setup
from loadtest.sim.simulation import Simulation
from loadtest.sim.trace import Trace, read_trace
from policies.registry import policy_names
from tests.loadtest.sim.traces import mooncake_rows, request, session_rows, timed, write

FLEET = Fleet((GPUS["h100"],) * 3, (60,) * 3)
SETUP = Setup(Path("none"), FLEET, Load(rate=8.0))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(write(tmp_path_factory.mktemp("t") / "m.jsonl", mooncake_rows(150)))


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(write(tmp_path_factory.mktemp("t") / "c.jsonl", session_rows(12)))


def play(trace: Trace, policy: str, setup: Setup = SETUP, seed: int = 1) -> Simulation:
    kind = PooledSimulation if policy == "pooled" else Simulation
    simulation = kind(setup, trace, PromptBook(), policy, seed)
    simulation.run()
    check_conserved(simulation)
    return simulation


def check_conserved(run: Simulation) -> None:
    """Every request ended once, in order, with all its tokens; nothing is left anywhere."""
    computed = 0
    for job in run.jobs:
        assert job.status in (JobStatus.DONE, JobStatus.FAILED, JobStatus.REFUSED)
        if job.status is JobStatus.DONE:
            assert job.dispatched_at is not None
            assert job.first_token_at is not None
            assert job.finished_at is not None
            assert job.arrived_at <= job.dispatched_at < job.first_token_at <= job.finished_at
            assert 0 <= job.cached_tokens < job.trace.num_prompt_tokens
            computed += job.trace.num_prompt_tokens - job.cached_tokens + job.trace.num_output_tokens - 1
    engines = [replica.engine for replica in run.replicas if replica.engine is not None]
    if not run.num_retries and not any(e.scheduler.stats().num_preemptions for e in engines):
        assert sum(engine.num_computed_tokens for engine in engines) == computed
    for replica in run.replicas:
        assert not replica.jobs
        assert replica.engine is None or not replica.engine.scheduler.has_work()
    for gateway in run.gateways:
        gateway.fleet.check_invariants()
        assert gateway.fleet.num_leases() == 0


def row(trace: Trace, policy: str, setup: Setup = SETUP, seed: int = 1) -> Figures:
    return figures(play(trace, policy, setup, seed), policy, seed)


@pytest.mark.parametrize("policy", [*policy_names(), "pooled"])
def test_every_policy_serves_everything(chats: Trace, policy: str) -> None:
    found = row(chats, policy)
    assert (found.num_requests, found.num_failed, found.num_refused) == (150, 0, 0)
    assert 0.0 < found.hit_ratio < 1.0
    assert found.imbalance >= 1.0
    assert found.ttft_p50_s <= found.ttft_p90_s <= found.ttft_p99_s


@pytest.mark.parametrize("policy", ["warm", "round_robin", "pooled"])
def test_a_seed_gives_the_same_run(chats: Trace, agents: Trace, policy: str) -> None:
    users = replace(SETUP, load=Load(users=4, ramp_s=1.0))
    assert row(chats, policy) == row(chats, policy)
    assert row(agents, policy, users) == row(agents, policy, users)
    assert row(chats, policy).ttft_mean_s != row(chats, policy, seed=2).ttft_mean_s


@pytest.mark.parametrize("policy", ["warm", "pooled"])
def test_fast_forward_changes_nothing(chats: Trace, policy: str) -> None:
    fast, slow = row(chats, policy), row(chats, policy, replace(SETUP, fast_forward=False))
    assert slow.num_plans == slow.num_steps == fast.num_steps > 2 * fast.num_plans
    assert fast.ttft_mean_s == pytest.approx(slow.ttft_mean_s, rel=1e-9)
    assert (fast.hit_ratio, fast.imbalance) == (slow.hit_ratio, slow.imbalance)


def test_the_pooled_cache_hits_most(chats: Trace, agents: Trace) -> None:
    """At a rate so low that requests don't overlap, so that what counts is only who holds what."""
    slow = replace(SETUP, load=Load(rate=0.5))
    pooled = row(chats, "pooled", slow).hit_ratio
    for policy in policy_names():
        assert row(chats, policy, slow).hit_ratio <= pooled, policy


def test_warm_beats_round_robin(chats: Trace, agents: Trace) -> None:
    for trace, setup in ((chats, SETUP), (agents, replace(SETUP, load=Load(users=6)))):
        warm, blind = row(trace, "warm", setup), row(trace, "round_robin", setup)
        assert warm.hit_ratio > blind.hit_ratio
        assert warm.ttft_mean_s < blind.ttft_mean_s


def test_users_wait_for_answers_and_think(agents: Trace) -> None:
    run = play(agents, "warm", replace(SETUP, load=Load(users=2)))
    by_session: dict[str, list[int]] = {}
    for index, job in enumerate(run.jobs):
        by_session.setdefault(job.trace.session, []).append(index)
        others = [other for other in run.jobs if other.arrived_at <= job.arrived_at < (other.finished_at or 0.0)]
        assert len(others) <= 2, "two users have two requests under way at most"
    for indices in by_session.values():
        for before, after in pairwise(indices):
            think_s = run.jobs[after].trace.think_s
            assert run.jobs[after].arrived_at == pytest.approx((run.jobs[before].finished_at or 0.0) + think_s)


def test_the_rate_is_as_asked(chats: Trace) -> None:
    for rate in (2.0, 20.0):
        assert row(chats, "warm", replace(SETUP, load=Load(rate=rate))).rate == pytest.approx(rate, rel=0.02)


def test_nothing_is_sent_after_the_duration(agents: Trace) -> None:
    run = play(agents, "warm", replace(SETUP, load=Load(users=2, duration_s=5.0)))
    assert 0 < len(run.jobs) < agents.num_requests
    assert run.jobs[-1].arrived_at <= 5.0


def test_a_mixed_fleet(chats: Trace) -> None:
    mixed = Fleet(tuple(parse_fleet("h100:2,l4:2", 0)), (60, 60, 37, 37))
    run = play(chats, "warm", replace(SETUP, fleet=mixed))
    share = {r.replica_id: sum(job.replica_id == r.replica_id for job in run.jobs) for r in run.replicas}
    fast, slow = list(share.values())[:2], list(share.values())[2:]
    assert sum(fast) > 2 * sum(slow), "the policy has learned who is fast"


def test_a_prompt_too_large_goes_to_the_replica_that_holds_it_or_is_refused() -> None:
    small_and_large = Fleet((GPUS["h100"],) * 2, (4, 20))
    setup = replace(SETUP, fleet=small_and_large, load=Load(rate=1.0))
    large, huge = request(*range(10)), request(*range(100, 140), at_s=1.0)
    run = play(timed(*[large] * 4, huge), "round_robin", setup)
    assert [job.status for job in run.jobs].count(JobStatus.REFUSED) == 1
    assert {job.replica_id for job in run.jobs if job.status is JobStatus.DONE} == {"r01"}


@pytest.mark.parametrize("policy", ["warm", "approximate_tree", "pooled"])
def test_replicas_die_and_come_back(chats: Trace, policy: str) -> None:
    troubled = replace(SETUP, conditions=Conditions(mtbf_s=4.0, mttr_s=2.0))
    run = play(chats, policy, troubled)
    assert run.num_retries > 0
    assert sum(replica.incarnation for replica in run.replicas) > 2
    assert sum(job.status is JobStatus.DONE for job in run.jobs) > 100


def test_gateways_that_know_of_each_other_late(chats: Trace) -> None:
    alone = row(chats, "warm")
    apart = row(chats, "warm", replace(SETUP, conditions=Conditions(gateways=3, share_delay_s=30.0)))
    near = row(chats, "warm", replace(SETUP, conditions=Conditions(gateways=3, share_delay_s=0.001)))
    assert near.hit_ratio == pytest.approx(alone.hit_ratio, abs=0.1)
    assert apart.ttft_mean_s > near.ttft_mean_s


def test_news_from_another_gateway_lets_those_go_that_wait(chats: Trace) -> None:
    """A gateway may have nothing under way itself when the others' first tokens make room for what waits in it."""
    busy = replace(SETUP, load=Load(rate=30.0), conditions=Conditions(gateways=3, share_delay_s=0.001))
    run = play(chats, "warm_queue", busy)
    assert all(job.status is JobStatus.DONE for job in run.jobs)
    assert all(gateway.queue is not None and not len(gateway.queue) for gateway in run.gateways)


def test_a_kv_event_feed(chats: Trace) -> None:
    feed = Conditions(kv_feed=True, feed_delay_s=0.01)
    told = play(chats, "warm", replace(SETUP, conditions=feed))
    for replica in told.replicas:
        assert told.gateways[0].fleet.stats(replica.replica_id).authoritative
    lossy = play(chats, "warm", replace(SETUP, conditions=replace(feed, feed_loss=0.2)))
    assert sum(replica.feed.num_lost for replica in lossy.replicas if replica.feed) > 10


def test_reports_of_load(chats: Trace) -> None:
    run = play(chats, "warm", replace(SETUP, conditions=Conditions(poll_s=0.5)))
    assert all(job.status is JobStatus.DONE for job in run.jobs)
