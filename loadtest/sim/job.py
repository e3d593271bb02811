"""One request on its way through the simulated fleet, and what is kept of it: raw times, whence all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from loadtest.sim.prompts import BlockName
from loadtest.sim.trace import TraceRequest
from policies.types import ReplicaId


class JobStatus(StrEnum):
    """REFUSED: larger than any replica's cache, so it never counts. FAILED: its client got an error."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Job:
    """`names`: of the prompt's blocks; `output_names`: of those its answer fills, where known. `user`: index of the
    closed-loop client that waits for it, or -1. Times are None until they happen."""

    job_id: str
    trace: TraceRequest
    names: Sequence[BlockName]
    arrived_at: float
    user: int = -1
    output_names: Sequence[BlockName] = ()
    gateway: int = 0
    replica_id: ReplicaId | None = None
    attempt: int = 0
    excluded: frozenset[ReplicaId] = frozenset()
    status: JobStatus = JobStatus.WAITING
    matched_tokens: int = 0
    cached_tokens: int = 0
    work_s: float = 0.0
    dispatched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    reason: str = ""
    attempts: list[str] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Seconds an output token after the first; 0 for one token."""
        assert self.finished_at is not None
        assert self.first_token_at is not None
        return (self.finished_at - self.first_token_at) / max(self.trace.num_output_tokens - 1, 1)
