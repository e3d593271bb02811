"""What is simulated: the fleet, the load, and what goes wrong. Frozen data that a worker process can be given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from loadtest.sim.gpus import TOKEN_BUDGET, Gpu


@dataclass(frozen=True, slots=True)
class Fleet:
    """`gpus` and `num_blocks` have one entry a replica. `num_blocks` counts blocks of the trace's size. The others are
    the scheduler's limits (engine_worker/core/limits.py)."""

    gpus: tuple[Gpu, ...]
    num_blocks: tuple[int, ...]
    token_budget: int = TOKEN_BUDGET
    max_num_seqs: int = 256
    joint_prefill_tokens: int = JOINT_PREFILL_TOKENS

    @property
    def size(self) -> int:
        return len(self.gpus)

    @property
    def fastest(self) -> Gpu:
        return min(self.gpus, key=lambda gpu: gpu.linear_s)


@dataclass(frozen=True, slots=True)
class Load:
    """Open loop at `rate` requests a second for the fleet (0: the trace's own), or a closed loop of `users`.

    max_think_s   thinks longer than this are cut to it
    think_scale   thinks are multiplied by it (before the cut)
    ramp_s        users start at some moment within it
    duration_s    no request is sent after it (None: the trace's end)
    """

    rate: float = 0.0
    users: int = 0
    max_think_s: float = float("inf")
    think_scale: float = 1.0
    ramp_s: float = 0.0
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything between a perfect gateway and a real one. Zeros: one gateway that learns at once of all it sees.

    gateways        requests are dealt out to so many; each knows of the others' after `share_delay_s`
    kv_feed         engines publish KV events; they arrive `feed_delay_s` later, and a step's batch is lost for good
                    with probability `feed_loss` (the gateway then asks for the whole cache: `feed_recover_s`)
    poll_s          replicas are asked for their load so often (0: never)
    mtbf_s, mttr_s  a replica dies after `mtbf_s` on average (0: never) and is back, empty, after `mttr_s`
    detect_s        how long a gateway goes on sending to a dead replica before it knows
    """

    gateways: int = 1
    share_delay_s: float = 0.0
    kv_feed: bool = False
    feed_delay_s: float = 0.0
    feed_loss: float = 0.0
    feed_recover_s: float = 1.0
    poll_s: float = 0.0
    mtbf_s: float = 0.0
    mttr_s: float = 30.0
    detect_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is served well if its first token came within `ttft_s` more than its cold prefill takes alone on the
    fleet's fastest GPU, and its output tokens at most `tpot_s` apart on average."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Setup:
    """One simulation but for policy and seed. `limit`: requests of the trace that are read; those longer than
    `max_model_len` (prompt and output) are left out. `reuse_outputs`: see outputs.py."""

    trace: Path
    fleet: Fleet
    load: Load
    conditions: Conditions = field(default_factory=Conditions)
    objective: Objective = field(default_factory=Objective)
    limit: int | None = None
    max_model_len: int | None = None
    reuse_outputs: bool = False
    fast_forward: bool = True
