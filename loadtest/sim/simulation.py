"""A whole fleet under load: clients, gateways, replicas, and what goes wrong between them.

A request's way: the workload sends it; its gateway chooses a replica and records the dispatch in one block; the engine
takes it; its first token and its end go back to the gateway, and, later, to the other gateways. A request that fails
before its first token is tried again as policies/retry.py says. One that no replica can hold is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine_worker.core.scheduler import RequestTooLarge
from engine_worker.core.types import RequestUpdate, SamplingParams
from loadtest.sim.clock import Clock
from loadtest.sim.engine import Engine
from loadtest.sim.feed import KVFeed
from loadtest.sim.gateway import MODEL, SPACE, SimGateway
from loadtest.sim.job import Job, JobStatus
from loadtest.sim.prompts import PromptBook, SimKVCacheManager, SimRequest
from loadtest.sim.setup import Setup
from loadtest.sim.trace import Trace, TraceRequest
from loadtest.sim.workload import Workload
from policies import events
from policies.events import FailureKind
from policies.retry import RETRY_AFTER_S, Outcome, Retry, next_step
from policies.types import PrefixChain, ReplicaId, ReplicaStatus, RouteRequest

_MAKES_NO_ROOM = (events.Dispatched, events.StatsReported)


class Replica:
    """An engine that can die and come back empty. `engine` is None while it is dead."""

    def __init__(self, replica_id: ReplicaId, index: int) -> None:
        self.replica_id = replica_id
        self.index = index
        self.engine: Engine | None = None
        self.feed: KVFeed | None = None
        self.incarnation = 0
        self.jobs: dict[str, Job] = {}


class Simulation:
    """One run. `jobs` are all requests sent, in order; figures.py makes figures of them."""

    def __init__(self, setup: Setup, trace: Trace, book: PromptBook, policy: str, seed: int) -> None:
        self.setup = setup
        self.clock = Clock()
        self.jobs: list[Job] = []
        self.num_retries = 0
        self.num_unplaced = 0
        self._trace = trace
        self._book = book
        self._seed = seed
        self._waiting: dict[str, tuple[Job, PrefixChain, RouteRequest]] = {}
        self._num_open = 0
        self._is_over = False
        self.replicas = [Replica(ReplicaId(f"r{index:02d}"), index) for index in range(setup.fleet.size)]
        self._by_id = {replica.replica_id: replica for replica in self.replicas}
        self._start_fleet(policy)
        self.workload = Workload(self.clock, trace, setup.load, self._rng("arrivals"), self._send)
        self._start_troubles()

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}")

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """To the end of the workload and of everything under way."""
        total, step = self._trace.num_requests, max(self._trace.num_requests // 50, 1)
        told = 0

        def over() -> bool:
            nonlocal told
            if progress is not None and len(self.jobs) >= told + step:
                told = len(self.jobs)
                progress(told / total)
            return self._num_open == 0 and (self.workload.is_over or len(self.jobs) == total)

        self.clock.run(over)
        self._is_over = True
        self.clock.run()  # news still on its way
        assert not self._num_open, f"{self._num_open} requests never ended"

    # Fleet

    def _start_fleet(self, policy: str) -> None:
        count = self.setup.conditions.gateways
        self.gateways = [
            SimGateway(policy, self._trace.block_tokens, self._rng(f"policy/{index}"), self._release)
            for index in range(count)
        ]
        for replica in self.replicas:
            self._start_engine(replica)
            if self.setup.conditions.kv_feed:
                rng = self._rng(f"feed/{replica.index}")
                replica.feed = KVFeed(replica.replica_id, self.clock, self.setup.conditions, rng, self._tell_all)
            blocks, tokens = self.setup.fleet.num_blocks[replica.index], self._trace.block_tokens
            joined = events.Joined(
                0.0, replica.replica_id, "0", frozenset((MODEL,)), SPACE, tokens, blocks,
                step_tokens=self.setup.fleet.token_budget, num_seats=self.setup.fleet.max_num_seqs,
            )  # fmt: skip
            self._tell_all(joined)

    def _start_engine(self, replica: Replica) -> None:
        fleet = self.setup.fleet
        kv = SimKVCacheManager(
            fleet.num_blocks[replica.index],
            self._trace.block_tokens,
            enable_kv_events=self.setup.conditions.kv_feed,
        )
        replica.engine = Engine(
            self.clock,
            fleet.gpus[replica.index],
            kv,
            partial(self._updated, replica),
            partial(self._publish, replica) if self.setup.conditions.kv_feed else None,
            fleet.token_budget,
            fleet.max_num_seqs,
            self.setup.fast_forward,
            fleet.joint_prefill_tokens,
        )

    def _publish(self, replica: Replica) -> None:
        assert replica.engine is not None
        assert replica.feed is not None
        replica.feed.publish(replica.engine.take_events())

    def _tell_all(self, event: events.Event) -> None:
        for gateway in self.gateways:
            self._show(gateway, event)

    def _tell(self, job: Job, event: events.Event) -> None:
        """The job's gateway knows at once, the others later."""
        for index, gateway in enumerate(self.gateways):
            if index == job.gateway:
                self._show(gateway, event)
            else:
                self.clock.at(self.clock.now + self.setup.conditions.share_delay_s, self._hear, gateway, event)

    def _hear(self, gateway: SimGateway, event: events.Event) -> None:
        """News from another gateway, by the hearer's own clock."""
        self._show(gateway, replace(event, at=self.clock.now))

    def _show(self, gateway: SimGateway, event: events.Event) -> None:
        """Whatever makes room lets those go that wait in the gateway, wherever it happened, as in gateway/router.py."""
        gateway.see(event)
        if not isinstance(event, _MAKES_NO_ROOM):
            gateway.poll(self.clock.now)

    # Requests

    def _send(self, request: TraceRequest, user: int) -> None:
        number = len(self.jobs)
        names = self._book.names(request.block_ids, request.session if user >= 0 else None)
        job = Job(str(number), request, names, self.clock.now, user)
        if request.output_block_ids:
            job.output_names = self._book.names(request.block_ids + request.output_block_ids)[len(names) :]
        job.gateway = number % self.setup.conditions.gateways
        self.jobs.append(job)
        self._num_open += 1
        self._place(job)

    def _place(self, job: Job) -> None:
        gateway = self.gateways[job.gateway]
        chain = gateway.chain(job)
        request = gateway.route_request(job, chain)
        self._waiting[job.job_id] = job, chain, request
        gateway.arrive(request, self.clock.now)

    def _release(self, job_id: str) -> None:
        """The gateway lets the request go: choose and record in one block."""
        job, chain, request = self._waiting.pop(job_id)
        gateway = self.gateways[job.gateway]
        decision = gateway.choose(request, self.clock.now)
        if decision is None:  # a client is told to come again
            self.num_unplaced += 1
            job.excluded = frozenset()
            self.clock.at(self.clock.now + RETRY_AFTER_S, self._place, job)
            return
        job.replica_id, job.matched_tokens, job.reason = decision.replica_id, decision.matched_tokens, decision.reason
        job.work_s = decision.work_s or 0.0
        job.attempt += 1
        job.dispatched_at = self.clock.now
        dispatched = events.Dispatched(
            self.clock.now,
            job.replica_id,
            job_id,
            chain,
            decision.matched_tokens,
            session=job.trace.session,
        )
        self._tell(job, dispatched)
        self._submit(job)

    def _submit(self, job: Job) -> None:
        assert job.replica_id is not None
        replica = self._by_id[job.replica_id]
        if replica.engine is None:
            self._failed(job, FailureKind.CONNECT)
            return
        try:
            replica.engine.submit(sim_request(job))
        except RequestTooLarge:
            self._too_large(job)
            return
        job.status = JobStatus.RUNNING
        replica.jobs[job.job_id] = job

    def _too_large(self, job: Job) -> None:
        """The engine's 400. A larger replica may take it."""
        assert job.replica_id is not None
        self._tell(job, events.Failed(self.clock.now, job.replica_id, job.job_id, FailureKind.REJECTED))
        job.excluded |= {job.replica_id}
        need = -(-(job.trace.num_prompt_tokens + job.trace.num_output_tokens - 1) // self._trace.block_tokens)
        sizes = self.setup.fleet.num_blocks
        if any(size >= need for size, r in zip(sizes, self.replicas, strict=True) if r.replica_id not in job.excluded):
            self._place(job)
        else:
            self._end(job, JobStatus.REFUSED)

    def _updated(self, replica: Replica, update: RequestUpdate) -> None:
        now, job = self.clock.now, replica.jobs[update.request_id]
        if job.first_token_at is None:
            job.first_token_at = now
            job.cached_tokens = update.num_cached_tokens
            self._tell(job, events.FirstToken(now, replica.replica_id, job.job_id, update.num_cached_tokens))
        if update.finish_reason is not None:
            job.finished_at = now
            del replica.jobs[job.job_id]
            finished = events.Finished(
                now, replica.replica_id, job.job_id, job.trace.num_output_tokens, update.num_cached_tokens,
                job.trace.num_prompt_tokens,
            )  # fmt: skip
            self._tell(job, finished)
            self._end(job, JobStatus.DONE)

    def _failed(self, job: Job, kind: FailureKind) -> None:
        assert job.replica_id is not None
        self._tell(job, events.Failed(self.clock.now, job.replica_id, job.job_id, kind))
        job.excluded |= {job.replica_id}
        gateway = self.gateways[job.gateway]
        num_left = gateway.num_candidates(gateway.route_request(job, gateway.chain(job)), self.clock.now)
        outcome = Outcome(kind, committed=job.first_token_at is not None)
        if isinstance(next_step(outcome, job.attempt, num_left), Retry):
            self.num_retries += 1
            self._place(job)
        else:
            self._end(job, JobStatus.FAILED)

    def _end(self, job: Job, status: JobStatus) -> None:
        job.status = status
        self._num_open -= 1
        self.workload.answered(job.user)

    # Troubles

    def _start_troubles(self) -> None:
        conditions = self.setup.conditions
        if conditions.mtbf_s:
            for replica in self.replicas:
                rng = self._rng(f"failures/{replica.index}")
                self.clock.at(rng.expovariate(1 / conditions.mtbf_s), self._die, replica, rng)
        if conditions.poll_s:
            for replica in self.replicas:
                self.clock.at(conditions.poll_s * (replica.index + 1) / len(self.replicas), self._report, replica)

    def _die(self, replica: Replica, rng: random.Random) -> None:
        if self._is_over:
            return
        conditions = self.setup.conditions
        lost, replica.jobs = list(replica.jobs.values()), {}
        assert replica.engine is not None
        replica.engine.stop(job.job_id for job in lost)
        replica.engine = None
        for job in lost:
            self._failed(job, FailureKind.BROKEN)
        now = self.clock.now
        down = events.StatusChanged(now + conditions.detect_s, replica.replica_id, ReplicaStatus.DOWN)
        self.clock.at(down.at, self._tell_all, down)
        self.clock.at(now + max(conditions.mttr_s, conditions.detect_s), self._restart, replica, rng)

    def _restart(self, replica: Replica, rng: random.Random) -> None:
        now = self.clock.now
        replica.incarnation += 1
        if replica.feed is not None:
            replica.feed.restart()
        self._start_engine(replica)
        self._tell_all(events.Restarted(now, replica.replica_id, str(replica.incarnation)))
        self._tell_all(events.StatusChanged(now, replica.replica_id, ReplicaStatus.READY))
        self.clock.at(now + rng.expovariate(1 / self.setup.conditions.mtbf_s), self._die, replica, rng)

    def _report(self, replica: Replica) -> None:
        now = self.clock.now
        if self._is_over:
            return
        if replica.engine is not None:
            stats = replica.engine.scheduler.stats()
            usage = 1.0 - stats.num_free_blocks / stats.num_blocks
            report = events.StatsReported(
                now, replica.replica_id, stats.num_running, stats.num_waiting, usage, stats.queued_prefill_tokens
            )
            self._tell_all(report)
        self.clock.at(now + self.setup.conditions.poll_s, self._report, replica)


def sim_request(job: Job, arrival_s: float | None = None) -> SimRequest:
    """The engine's request for a job. `arrival_s`: its place in the engine's queue."""
    return SimRequest(
        request_id=job.job_id,
        prompt_ids=range(job.trace.num_prompt_tokens),  # type: ignore[arg-type]
        params=SamplingParams(max_tokens=job.trace.num_output_tokens),
        arrival_s=job.arrived_at if arrival_s is None else arrival_s,
        work_s=job.work_s,
        names=[*job.names, *job.output_names] if job.output_names else job.names,
    )
