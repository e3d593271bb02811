"""The nouns of the engine's core: requests, sampling parameters, and a step's plan and result, as plain data.

One rule drives everything (vLLM v1's): there is no prefill phase and no decode phase. A request has tokens (prompt,
output and, later, speculated ones) and `num_computed`, how many of them have their keys and values in the cache. Each
step computes some more. Chunked prefill, prefix hits, preemption and resume are all values of that one counter.

The scheduler plans a step as data, the runner executes it, the scheduler commits the result. The runner reads requests
through the plan and never changes them. Nothing here imports torch, a clock or I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType

MIN_TEMPERATURE = 1e-5  # below it a request is greedy: dividing by it would overflow float32

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)  # SHA-256 over parent hash and token ids; see core/block_pool.py


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How output tokens are chosen and when to stop, for one sequence. Already validated (serving does that).

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `num_logprobs` None means no logprobs; k means the
    sampled token's and the k likeliest ones'. `stop_token_ids` ends the sequence unless `ignore_eos` is set for ids in
    the model's EOS set; `min_tokens` forbids all of them until that many tokens were made. Stop strings live in the
    detokenizer, not here.

    `grammar` is llguidance's serialised grammar that the whole output must follow; "" is none. `allowed_token_ids`
    restricts the output to these ids where any are given. `bad_words` are token sequences that must not appear: the
    last token of one is forbidden behind the others. `num_prompt_logprobs` asks for the prompt's own logprobs, with as
    many likeliest tokens beside each; None for none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int | None = None
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence is over.

    STOP: an EOS or stop token, or a grammar that is complete. LENGTH: max_tokens or model length. ABORT: cancelled.
    ERROR: it failed alone.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence inside the engine (the n choices of an API request are n of these).

    num_computed      tokens whose KV is in the cache blocks of `block_ids`; the only progress counter
    output_ids        tokens put out; a request that is added with some goes on behind them
    draft_ids         speculated tokens behind the output, there from `Scheduler.speculate` to the step's commit
    work_s            seconds of prefill that whoever sent it expects here; orders those who wait (waiting_queue.py)
    num_cached_tokens prompt tokens that the first admission found in the prefix cache; None before it. A resume after
                      preemption does not change it
    leader_id         a sibling (another of the n choices) whose prompt must be computed first, so that this one finds
                      the prompt's blocks in the cache. Add the leader before its followers
    first_planned_s   the `now` of the first plan that computed some of it; None before (its time in the queue)
    copy_from         a block whose first `num_computed % block_size` rows the request's next step copies into the last
                      block of its table, before it computes; None for most (core/kv_manager.py)
    num_scored        prompt tokens behind the first whose logprobs were reported (with `num_prompt_logprobs` only)
    num_draft_tokens, num_accepted_tokens
                      speculated tokens that were verified, and those of them that became output
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    salt: str = ""
    priority: int = 0
    work_s: float = 0.0
    leader_id: str | None = None
    output_ids: list[int] = field(default_factory=list)
    draft_ids: tuple[int, ...] = ()
    num_computed: int = 0
    num_cached_tokens: int | None = None
    block_ids: list[BlockId] = field(default_factory=list)
    copy_from: BlockId | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_preemptions: int = 0
    first_planned_s: float | None = None
    num_scored: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt, output and speculated tokens: what `num_computed` chases."""
        return len(self.prompt_ids) + len(self.output_ids) + len(self.draft_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens: those that are there to stay."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def skips_cache_reads(self) -> bool:
        """Whether logits of the prompt are still wanted, which only computing it gives: a cached prefix has none."""
        return self.params.num_prompt_logprobs is not None and self.num_scored < len(self.prompt_ids) - 1

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of positions start..end-1, prompt first, then output, then drafts."""
        num_prompt, num_known = len(self.prompt_ids), self.num_known_tokens
        if end > num_known:
            drafts = self.draft_ids[max(start - num_known, 0) : end - num_known]
            return (*self.token_ids(start, num_known), *drafts) if start < num_known else drafts
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        if start >= num_prompt:
            return tuple(self.output_ids[start - num_prompt : end - num_prompt])
        return (*self.prompt_ids[start:], *self.output_ids[: end - num_prompt])


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a step: compute positions start .. start + len(token_ids) - 1.

    `block_ids` covers every position up to the segment's end: position p lives in block block_ids[p // block_size] at
    offset p % block_size. It is a read-only view of a growing list, not a copy: entries up to the segment's end stay as
    they are as long as the segment is used, and more may follow them. `sample` asks for one token from the last
    position's logits. The last `num_drafts` tokens are speculated: a token is sampled from the position before them and
    from each of theirs, as long as what was sampled is what was speculated.

    With `copy_from`, the first start % block_size rows of that block must be copied into the block of position `start`
    before the step writes anything.
    """

    request: Request
    start: int
    token_ids: tuple[int, ...]
    block_ids: Sequence[BlockId]
    sample: bool
    num_drafts: int = 0
    copy_from: BlockId | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def draft_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.token_ids) - self.num_drafts :])

    def without_drafts(self) -> Segment:
        """The same up to the last token that is no guess."""
        return replace(self, token_ids=self.token_ids[: len(self.token_ids) - self.num_drafts], num_drafts=0)

    @property
    def num_rows(self) -> int:
        """Positions whose logits a token may be sampled from."""
        return 1 + self.num_drafts if self.sample else 0

    @property
    def scored(self) -> range:
        """Positions whose logits are wanted for the logprob of the prompt token behind each."""
        request = self.request
        if request.params.num_prompt_logprobs is None:
            return range(0)
        return range(max(self.start, request.num_scored), min(self.end, len(request.prompt_ids) - 1))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner does in one step. Empty `segments` means there is nothing to run."""

    segments: tuple[Segment, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. Logprobs are of the raw model distribution (log-softmax of the unmodified logits).

    `rank` is 1 for the likeliest; it is known for prompt tokens only.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first
    rank: int | None = None


class Refusal(str):
    """Why a request failed, where it is to blame itself: it would fail anywhere, until its client changes it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The runner's answer: a token for every segment with `sample`, except for requests that failed alone.

    failed           request id -> one sentence, a Refusal where the request is to blame
    completed        requests whose grammar allows nothing behind the last sampled token
    following        request id -> tokens sampled behind the first one: one for each draft that was right, in order
    prompt_logprobs  request id -> the prompt token behind each of the segment's `scored` positions, with logprobs
    """

    sampled: dict[str, SampledToken]
    failed: dict[str, str] = field(default_factory=dict)
    completed: frozenset[str] = frozenset()
    prompt_logprobs: dict[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    following: dict[str, tuple[SampledToken, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a committed step means for one request, to be sent to whoever waits for it.

    With speculation a step may bring a request several tokens: each has an update of its own, in order.

    is_complete      the grammar's end ended the sequence: the last token is part of the output, no stop token
    prompt_logprobs  prompt tokens with their logprobs, those that follow what earlier updates brought
    num_draft_tokens, num_accepted_tokens
                     see Request: so far, up to this token; those behind it in the same step don't count yet
    """

    request_id: str
    token: SampledToken | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
    error: str | None = None
    is_complete: bool = False
    prompt_logprobs: tuple[SampledToken, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def of(
        cls,
        request: Request,
        token: SampledToken | None,
        reason: FinishReason | None,
        error: str | None = None,
        is_complete: bool = False,
        scores: tuple[SampledToken, ...] = (),
    ) -> RequestUpdate:
        """An update of a request that was admitted, with its counts as they are now."""
        cached = request.num_cached_tokens
        assert cached is not None
        drafts, accepted = request.num_draft_tokens, request.num_accepted_tokens
        return cls(request.request_id, token, reason, cached, error, is_complete, scores, drafts, accepted)
