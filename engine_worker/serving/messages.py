"""What the API process and the engine process say to each other, as msgpack over a socket pair (pipe.py).

API to engine: `Add` (all sequences of one API request at once), `Cancel`, `Shutdown`.
Engine to API: `Progress` while loading, then `Ready` or `LoadFailed`, then a `Step` after every engine step and
whenever the load changed, and a `Beat` every second.

Both sides belong to one release, so the messages carry no version. Each life of the engine has a pair of its own, so a
message can't come from an earlier one.
"""

from __future__ import annotations

import msgspec

from engine_worker.config import EngineConfig, ModelInfo
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.types import FinishReason, SampledToken, SamplingParams


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on the engine process's standard input, as JSON. That pipe's end means that the parent is gone.

    loader            "module:function" that gives a ModelRunner for a config and a progress callback
    descriptor        the engine's end of the socket pair, which the process inherits
    check_invariants  check the scheduler and the cache after every step (slow; for tests)
    """

    config: EngineConfig
    loader: str
    descriptor: int
    check_invariants: bool = False


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate. `arrival_s` is CLOCK_MONOTONIC, which all processes of a machine share.

    `choices` are further answers to the same prompt, each by its request id and seed: all else is this one's, but for
    the prompt's scores, which this one alone gives. So hundreds of choices don't bring the prompt hundreds of times.
    `output_ids` are tokens that it has put out elsewhere: it goes on behind them. `work_s`: see contract/work.py.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival_s: float
    salt: str = ""
    choices: list[tuple[str, int | None]] = []
    output_ids: list[int] = []
    work_s: float = 0.0


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    sequences: list[Sequence]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    pass


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """One line about loading."""

    detail: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: ModelInfo
    tokenizer: TokenizerBundle
    kv_events_endpoint: str
    kv_events_replay_endpoint: str


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The model can't be served; trying again would end the same way."""

    message: str


class Update(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence.

    error_status, error_code
                  the HTTP status that `error` deserves, and the code beside it
    is_complete, prompt_logprobs, num_draft_tokens, num_accepted_tokens
                  see core.types.RequestUpdate
    queue_s, prefill_s
                  with the first token only: seconds from arrival to the first step, and from there to the token
    """

    request_id: str
    token: SampledToken | None
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    error: str | None = None
    error_status: int = 500
    error_code: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    is_complete: bool = False
    prompt_logprobs: tuple[SampledToken, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's load after a step. Preemptions and the prefix cache's and drafts' counts grow over its life.

    `num_copied_tokens`: of the prefix cache's hits, those in parts of blocks.
    `is_speculating`: speculation is configured, and pays at present. `num_idle_checks` is how often the engine, without
    work, found its books in order.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_speculating: bool = False
    num_idle_checks: int = 0
    num_copied_tokens: int = 0


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The engine process runs: sent every BEAT_S from a thread of its own, also while a long step computes."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """After an engine step (or a change of load without one: `num_tokens` 0)."""

    updates: list[Update]
    stats: Stats
    num_tokens: int


ToEngine = Add | Cancel | Shutdown
FromEngine = Progress | Ready | LoadFailed | Step | Beat

BEAT_S = 1.0

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
