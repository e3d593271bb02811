"""The pooled limit: what one giant shared cache could do. Not a policy, since no gateway could follow it.

All replicas compute over one block pool of N x C blocks, so every hit is a hit everywhere. Requests wait in one queue
and the one with the least uncached work goes first (as of now: what is cached changes while it waits), to a replica
that has less than a step's tokens to prefill. A request is only let in when the pool holds all that the admitted ones
may grow to, so nobody is preempted. Compute, batching and chunking are those of the replicas as they are.
"""

from __future__ import annotations

from functools import partial

from engine_worker.core.block_pool import BlockPool
from engine_worker.core.types import RequestUpdate
from loadtest.sim.engine import Engine
from loadtest.sim.job import Job, JobStatus
from loadtest.sim.prompts import SimKVCacheManager
from loadtest.sim.simulation import Replica, Simulation, sim_request
from policies import events
from policies.events import FailureKind

NAME = "pooled"
NUM_LOOKED_AT = 8  # of the shortest by their last estimate, whose work is looked up again


class PooledSimulation(Simulation):
    """The same clients, engines and failures, without gateways."""

    def _start_fleet(self, policy: str) -> None:
        self.gateways = []
        self._pool = BlockPool(sum(self.setup.fleet.num_blocks))
        self._queue: dict[Job, float] = {}  # seconds of work as last looked up
        self._num_promised = 0
        for replica in self.replicas:
            self._start_engine(replica)

    def _start_engine(self, replica: Replica) -> None:
        fleet = self.setup.fleet
        kv = SimKVCacheManager(self._pool.num_blocks, self._trace.block_tokens, self._pool)
        replica.engine = Engine(
            self.clock,
            fleet.gpus[replica.index],
            kv,
            partial(self._updated, replica),
            partial(self._refill, replica),
            fleet.token_budget,
            fleet.max_num_seqs,
            self.setup.fast_forward,
            fleet.joint_prefill_tokens,
        )

    def _tell(self, job: Job, event: events.Event) -> None:
        pass

    def _tell_all(self, event: events.Event) -> None:
        pass

    def _place(self, job: Job) -> None:
        if self._num_blocks(job) > self._pool.num_blocks:
            self._end(job, JobStatus.REFUSED)
            return
        self._queue[job] = self._work_s(job)
        idle = [replica for replica in self.replicas if self._has_room(replica)]
        if idle:
            self._refill(min(idle, key=_load))

    def _refill(self, replica: Replica) -> None:
        """Give the replica the shortest requests until its next step is full."""
        while self._queue and self._has_room(replica):
            shortest = sorted(self._queue, key=self._queue.__getitem__)[:NUM_LOOKED_AT]
            for job in shortest:
                self._queue[job] = self._work_s(job)
            job = min(shortest, key=self._queue.__getitem__)
            if self._num_promised + self._num_blocks(job) > self._pool.num_blocks:
                return
            del self._queue[job]
            self._num_promised += self._num_blocks(job)
            self._admit(job, replica)

    def _admit(self, job: Job, replica: Replica) -> None:
        assert replica.engine is not None
        job.replica_id, job.dispatched_at = replica.replica_id, self.clock.now
        job.attempt += 1
        job.status = JobStatus.RUNNING
        replica.jobs[job.job_id] = job
        replica.engine.submit(sim_request(job, arrival_s=self.clock.now))

    def _updated(self, replica: Replica, update: RequestUpdate) -> None:
        job = replica.jobs[update.request_id]
        super()._updated(replica, update)
        if update.finish_reason is not None:
            self._num_promised -= self._num_blocks(job)

    def _has_room(self, replica: Replica) -> bool:
        if replica.engine is None:
            return False
        stats = replica.engine.scheduler.stats()
        seats = self.setup.fleet.max_num_seqs - stats.num_running - stats.num_waiting
        return seats > 0 and stats.queued_prefill_tokens < self.setup.fleet.token_budget

    def _num_blocks(self, job: Job) -> int:
        return -(-(job.trace.num_prompt_tokens + job.trace.num_output_tokens) // self._trace.block_tokens) + 1

    def _work_s(self, job: Job) -> float:
        """Seconds of prefill that the pool doesn't save."""
        kv = SimKVCacheManager(1, self._trace.block_tokens, self._pool)
        cached = len(kv.lookup(sim_request(job))) * self._trace.block_tokens
        uncached = job.trace.num_prompt_tokens - cached
        gpu = self.setup.fleet.fastest
        return gpu.linear_s * uncached + gpu.attention_s * uncached * (cached + uncached / 2)

    def _failed(self, job: Job, kind: FailureKind) -> None:
        """What was computed of it stays in the pool; before its first token it waits again."""
        self._num_promised -= self._num_blocks(job)
        if job.first_token_at is None:
            self.num_retries += 1
            self._place(job)
        else:
            self._end(job, JobStatus.FAILED)


def _load(replica: Replica) -> tuple[int, int]:
    assert replica.engine is not None
    stats = replica.engine.scheduler.stats()
    return stats.queued_prefill_tokens, stats.num_running
