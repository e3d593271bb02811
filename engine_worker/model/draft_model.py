"""Guesses by a smaller model of the same vocabulary, in batches, over a paged cache of its own.

The cache has as many blocks as the model's, and a request's block table serves both: position p lies in the same slot
of either. What it holds is computed late, when guesses are first asked for: the tokens that it lacks (a prompt, or what
was put out meanwhile) in one packed forward, the guesses in one forward a level, all requests together.

A block that came by a prefix hit may hold the drafter's keys and values too, or not. Each block has a stamp, a hash of
all tokens up to its end, set once it was filled here and dropped when it is written again; a request starts behind the
leading blocks whose stamps are its own. A wrong stamp could only cost right guesses, never a right answer.

Guesses are drawn with the noise that the model will draw with in their place (Sampler.propose): see core/drafts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.core.types import Request, Segment
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.packing import BlockTables, fresh_blocks, pack
from engine_worker.model.sampler import Sampler
from engine_worker.model.sampler_rows import Row


@dataclass(slots=True)
class _State:
    """One request: `num_valid` leading positions have true keys and values here, `stamps` name its full blocks."""

    num_preemptions: int
    num_valid: int = 0
    stamps: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """One request in a call of `propose`: its guesses so far, of `most`."""

    request: Request
    most: int
    state: _State
    guesses: list[int] = field(default_factory=list)


class ModelDrafter:
    """`propose` guesses, `release` forgets a request. `budget`: tokens of one forward at most.

    `sampler` is the model's own, whose noise and logit edits guesses follow.
    """

    needs_slots = True

    def __init__(
        self, name: str, model: PackedModel, sampler: Sampler, max_num_seqs: int, max_model_len: int, budget: int
    ) -> None:
        self.name = name
        self._model = model
        self._sampler = sampler
        self._block_size = model.kv.block_size
        self._max_model_len = max_model_len
        self._budget = budget
        self._num_embeddings = model.module.get_input_embeddings().weight.shape[0]
        blocks_per_row = min(-(-max_model_len // self._block_size), model.kv.num_blocks)
        self._tables = BlockTables(max_num_seqs, blocks_per_row, self._block_size)
        self._stamps: dict[int, int] = {}  # block -> stamp
        self._states: dict[str, _State] = {}

    @torch.inference_mode()
    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]:
        """For each (request, guesses wanted): up to so many, () where it can't guess yet. Slots must be there."""
        jobs = [self._job(request, most) for request, most in wanted]
        ready, logits = self._catch_up([job for job in jobs if job.most > 0])
        while ready:
            assert logits is not None
            rows = [Row(i, j.request, [*j.request.output_ids, *j.guesses]) for i, j in enumerate(ready)]
            for job, guess in zip(ready, self._sampler.propose(self._fitted(logits), rows), strict=True):
                job.guesses.append(guess)
            ready = [job for job in ready if len(job.guesses) < job.most and job.guesses[-1] < self._num_embeddings]
            segments = [self._segment(job, job.request.num_known_tokens + len(job.guesses) - 1) for job in ready]
            logits = self._run(segments)
        return [tuple(job.guesses) for job in jobs]

    def release(self, request_id: str) -> None:
        """Idempotent."""
        self._tables.release(request_id)
        self._states.pop(request_id, None)

    @property
    def num_states(self) -> int:
        return len(self._states)

    def check_invariants(self) -> None:
        self._tables.check_invariants()
        self._model.kv.check_invariants()
        for state in self._states.values():
            assert len(state.stamps) <= state.num_valid // self._block_size

    # -- inside

    def _job(self, request: Request, most: int) -> _Job:
        state = self._states.get(request.request_id)
        if state is None or state.num_preemptions != request.num_preemptions:
            state = self._states[request.request_id] = self._begin(request)
        state.num_valid = min(state.num_valid, request.num_known_tokens - 1)  # refused guesses lie behind
        room = self._max_model_len - request.num_known_tokens
        return _Job(request, max(0, min(most, room)), state)

    def _begin(self, request: Request) -> _State:
        """A request's state with the block table that it has now: behind the blocks that are filled for it already."""
        state = _State(request.num_preemptions)
        for index in range((request.num_known_tokens - 1) // self._block_size):
            stamp = self._stamp(request, state, index)
            if self._stamps.get(request.block_ids[index]) != stamp:
                break
            state.stamps.append(stamp)
        state.num_valid = len(state.stamps) * self._block_size
        return state

    def _stamp(self, request: Request, state: _State, index: int) -> int:
        before = state.stamps[index - 1] if index else 0
        return hash((before, request.token_ids(index * self._block_size, (index + 1) * self._block_size)))

    def _catch_up(self, jobs: list[_Job]) -> tuple[list[_Job], Tensor | None]:
        """Compute what the requests lack, as far as the budget goes. Those that lack nothing more, and their logits."""
        budget, segments, ready = self._budget, [], []
        for job in sorted(jobs, key=lambda job: job.request.num_known_tokens - job.state.num_valid):
            request, start = job.request, job.state.num_valid
            end = min(request.num_known_tokens, start + budget)
            token_ids = request.token_ids(start, end)
            if start == end or max(token_ids) >= self._num_embeddings:
                continue
            is_ready = end == request.num_known_tokens
            segments.append(Segment(request, start, token_ids, request.block_ids, sample=is_ready))
            budget -= end - start
            if is_ready:
                ready.append(job)
        logits = self._run(segments)
        for segment in segments:
            state = self._states[segment.request.request_id]
            state.num_valid = segment.end
            for index in range(len(state.stamps), segment.end // self._block_size):
                state.stamps.append(self._stamp(segment.request, state, index))
                self._stamps[segment.request.block_ids[index]] = state.stamps[index]
        return ready, logits

    def _segment(self, job: _Job, position: int) -> Segment:
        return Segment(job.request, position, (job.guesses[-1],), job.request.block_ids, sample=True)

    def _run(self, segments: list[Segment]) -> Tensor | None:
        """Logits [R, V] behind the last token of each segment with `sample`."""
        if not segments:
            return None
        kv = self._model.kv
        if kv.has_polluted_blocks:
            kv.scrub([block for segment in segments for block in fresh_blocks(segment, kv.block_size)])
        for segment in segments:
            for index in range(segment.start // self._block_size, -(-segment.end // self._block_size)):
                self._stamps.pop(segment.block_ids[index], None)
        batch = pack(segments, self._tables, self._model.device)
        keep = [index for index, segment in zip(batch.last_index, segments, strict=True) if segment.sample]
        return self._model.forward(batch, keep)

    def _fitted(self, logits: Tensor) -> Tensor:
        """As wide as the model's logits: padding of the vocabulary may differ, and is never a guess."""
        more = self._sampler.vocab_size - logits.shape[1]
        return F.pad(logits, (0, more), value=-torch.inf) if more > 0 else logits[:, : self._sampler.vocab_size]
