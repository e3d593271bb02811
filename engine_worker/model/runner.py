"""Executes the scheduler's plans: packs a step's segments, runs the model once, samples where a token is due.

The runner decides nothing. It keeps only what follows from the plans it saw: a block-table row and sampler state for
each request, both dropped by `release`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from engine_worker.config import ModelInfo
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.ahead import PLACEHOLDER, can_defer
from engine_worker.core.types import Refusal, Request, SampledToken, Segment, StepPlan, StepResult
from engine_worker.model.packed_model import Likeliest, PackedModel
from engine_worker.model.packing import BlockTables, PackedBatch, copies_of, fresh_blocks, pack
from engine_worker.model.prompt_scores import score_prompts
from engine_worker.model.sampler import UNSOUND, Sampler
from engine_worker.model.sampler_deferred import DeferredSampling
from engine_worker.model.transfer import to_device


class SamplerLike(Protocol):
    """What the runner asks of a sampler: see sampler.Sampler."""

    def prepare(self, segments: Iterable[Segment]) -> None: ...

    def sample(
        self, logits: torch.Tensor, segments: Sequence[Segment], found: Likeliest | None = None
    ) -> tuple[dict[str, SampledToken], dict[str, str]]: ...

    @property
    def completed(self) -> frozenset[str]: ...

    @property
    def following(self) -> dict[str, tuple[SampledToken, ...]]: ...

    def release(self, request_id: str) -> None: ...


class Drafter(Protocol):
    """What guesses output tokens: see draft_ngram and draft_model."""

    name: str
    needs_slots: bool

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]: ...

    def release(self, request_id: str) -> None: ...


class LaunchedStep:
    """A step on its way, and what is known of it already."""

    def __init__(self, known: StepResult, sampling: DeferredSampling | None) -> None:
        self._known = known
        self._sampling = sampling

    def result(self) -> StepResult:
        """Waits for the device."""
        if self._sampling is None:
            return self._known
        sampled, unsound = self._sampling.result()
        return StepResult(sampled, {**self._known.failed, **unsound})


class ModelRunner:
    """A loaded model, ready to execute plans. Use it from one thread.

    `info` says what was loaded, `tokenizer` is the bundle that the gateway fetches, `drafter` speculates, if set.
    """

    def __init__(
        self,
        model: PackedModel,
        sampler: SamplerLike,
        info: ModelInfo,
        tokenizer: TokenizerBundle,
        max_num_seqs: int,
        drafter: Drafter | None = None,
    ) -> None:
        assert model.kv.num_blocks >= info.num_blocks
        assert model.kv.block_size == info.block_size
        self.info = info
        self.tokenizer = tokenizer
        self.drafter = drafter
        self._model = model
        self._sampler = sampler
        self._num_embeddings = model.module.get_input_embeddings().weight.shape[0]
        blocks_per_row = min(-(-info.max_model_len // info.block_size), info.num_blocks)
        self._tables = BlockTables(max_num_seqs, blocks_per_row, info.block_size)
        self._last: DeferredSampling | None = None  # of the latest launch

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A request whose token ids or logits are unsound fails alone; other errors are the engine's."""
        for request_id in plan.preempted:
            self._tables.release(request_id)
        failed: dict[str, str] = {}
        segments = [segment for segment in plan.segments if self._accepts(segment, failed)]
        if not segments:
            return StepResult({}, failed)

        result = self._run(segments, failed)
        guessed = [segment for segment in segments if segment.num_drafts]
        return self._despite(guessed, result) if guessed else result

    def _run(self, segments: Sequence[Segment], failed: dict[str, str]) -> StepResult:
        """Compute these segments and sample. `failed` are requests that the result is to have among its own."""
        self._prepare_blocks(segments)
        self._sampler.prepare(segments)
        batch = pack(segments, self._tables, self._model.device)
        keep: list[int] = []
        sampling: list[Segment] = []
        scored: list[Segment] = []
        scored_rows: list[int] = []
        for segment, last in zip(segments, batch.last_index, strict=True):
            if segment.sample:  # the last token's position, and with drafts those before it
                sampling.append(segment)
                keep += range(last - segment.num_drafts, last + 1)
            if segment.request.params.num_prompt_logprobs is not None and segment.scored:
                scored.append(segment)
                scored_rows += [last - (segment.end - 1 - position) for position in segment.scored]
        num_rows = len(keep)
        logits = self._model.forward(batch, keep + scored_rows)
        if logits is None:
            return StepResult({}, failed)
        found = self._model.last_likeliest
        if not scored:
            sampled, unsound = self._sampler.sample(logits, sampling, found)
            failed = {**failed, **unsound}
            return StepResult(sampled, failed, self._sampler.completed, {}, self._sampler.following)
        scores, unscored = score_prompts(logits[num_rows:], scored)
        found = None if found is None else (found[0][:num_rows], found[1][:num_rows])
        sampled, unsound = self._sampler.sample(logits[:num_rows], sampling, found)
        failed = {**failed, **unsound, **unscored}
        return StepResult(sampled, failed, self._sampler.completed, scores, self._sampler.following)

    def _despite(self, guessed: Sequence[Segment], result: StepResult) -> StepResult:
        """The step's result as if no guess had ever been computed whose keys or values are not finite.

        Such a guess is hidden from the tokens before it by a weight of 0, but 0 * NaN is NaN: it takes them along. Who
        failed is therefore asked once more, without guesses, which tells whether the tokens themselves are to blame.
        And what a wrong guess left behind the output is wiped, for it would come with the padding of a later step.
        """
        kv = self._model.kv
        if kv.has_polluted_blocks:
            for segment in guessed:
                num_right = len(result.following.get(segment.request.request_id, ()))
                kv.wipe(_slots(segment, segment.end - segment.num_drafts + num_right, kv.block_size))
        doubted = [segment for segment in guessed if result.failed.get(segment.request.request_id) == UNSOUND]
        if not doubted:
            return result
        names = {segment.request.request_id for segment in doubted}
        others = {name: reason for name, reason in result.failed.items() if name not in names}
        again = self._run([segment.without_drafts() for segment in doubted], others)
        return replace(
            again,
            sampled={**result.sampled, **again.sampled},
            completed=result.completed | again.completed,
            prompt_logprobs={**result.prompt_logprobs, **again.prompt_logprobs},
            following=result.following,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue one step and return while the device works on it; its tokens stay there for a plan ahead.

        A plan whose tokens the host must choose (core/ahead.py) is run to its end at once.
        """
        if not (plan.segments and can_defer(plan) and isinstance(self._sampler, Sampler)):
            return LaunchedStep(self.execute(plan) if plan.segments else StepResult({}), None)
        for request_id in plan.preempted:
            self._tables.release(request_id)
        last, self._last = self._last, None
        failed: dict[str, str] = {}
        segments = []
        for segment in plan.segments:
            if segment.token_ids == (PLACEHOLDER,):
                # Whoever was refused in the step before has nothing to go on with, and has ended when this is read.
                usable = last is not None and segment.request.request_id in last.rows
            else:
                usable = self._accepts(segment, failed)
            if usable:
                segments.append(segment)
        if not segments:
            return LaunchedStep(StepResult({}, failed), None)
        self._prepare_blocks(segments)
        batch = pack(segments, self._tables, self._model.device)
        if last is not None:
            _put_sampled(batch, segments, last)
        rows = [index for index, segment in enumerate(segments) if segment.sample]
        logits = self._model.forward(batch, [batch.last_index[index] for index in rows])
        if logits is None:
            return LaunchedStep(StepResult({}, failed), None)
        self._last = DeferredSampling(self._sampler, logits, [segments[index] for index in rows])
        return LaunchedStep(StepResult({}, failed), self._last)

    def _prepare_blocks(self, segments: Sequence[Segment]) -> None:
        """Before a step writes: clean the blocks that it starts on, and bring the rows that its requests copy."""
        kv = self._model.kv
        if kv.has_polluted_blocks:
            kv.scrub([block for segment in segments for block in fresh_blocks(segment, kv.block_size)])
        copies = copies_of(segments, kv.block_size)
        if copies:
            kv.copy_rows(copies)

    def release(self, request_id: str) -> None:
        """Forget a request that is over (finished, failed or cancelled). Idempotent."""
        self._tables.release(request_id)
        self._sampler.release(request_id)

    def check_idle(self) -> None:
        """Asserts that nothing is remembered of any request. Cheap: it does not read the cache."""
        self._tables.check_invariants()
        assert self._tables.num_used == 0, "a block table of a request that is over"
        assert getattr(self._sampler, "num_states", 0) == 0, "sampler state of a request that is over"

    def check_invariants(self) -> None:
        self._tables.check_invariants()
        self._model.kv.check_invariants()

    def _accepts(self, segment: Segment, failed: dict[str, str]) -> bool:
        """An id without an embedding would abort the whole step: refuse its request alone."""
        if min(segment.token_ids) >= 0 and max(segment.token_ids) < self._num_embeddings:
            return True
        outside = next(token for token in segment.token_ids if not 0 <= token < self._num_embeddings)
        failed[segment.request.request_id] = Refusal(
            f"Token id {outside} is outside the model's vocabulary of {self._num_embeddings}; "
            "send ids made by this model's tokenizer."
        )
        return False


def _slots(segment: Segment, start: int, block_size: int) -> list[int]:
    """Where the segment's positions from `start` on lie in the cache."""
    return [
        segment.block_ids[position // block_size] * block_size + position % block_size
        for position in range(start, segment.end)
    ]


def _put_sampled(batch: PackedBatch, segments: Sequence[Segment], last: DeferredSampling) -> None:
    """Put the last step's tokens where the plan has placeholders for them."""
    late = [index for index, segment in enumerate(segments) if segment.token_ids == (PLACEHOLDER,)]
    if late:
        places = to_device([batch.last_index[index] for index in late], batch.input_ids.device)
        rows = to_device([last.rows[segments[index].request.request_id] for index in late], places.device)
        batch.input_ids[0, places] = last.ids[rows]
