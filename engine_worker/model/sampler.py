"""Choosing each request's next token from its logits: one batched pass, each row independent of its neighbours.

The order of operations is vLLM's and OpenAI's:

    raw logits -> logprobs are taken here
        -> repetition, frequency and presence penalties -> logit_bias -> masks (min_tokens, bad words, allowed ids,
           grammar)
        -> temperature -> top-k -> top-p -> min-p -> draw

A row that asks for none of this is an argmax over the logits and nothing else. A row with a NaN or without any finite
logit fails alone: the batch goes on, and the request gets one sentence.

What a request needs remembered between steps (its seed, the tokens its penalties count) lives here under its id, from
the first sampled token until `release`. It follows `request.output_ids`, which survive preemption, so a resumed request
goes on where it was. A draw depends on (seed, number of output tokens) alone, never on the batch: see sampler_draw.
So speculated tokens are verified by drawing (sampler_rows): each place draws what it would draw without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine_worker.core.types import Refusal, Request, SampledToken, Segment
from engine_worker.model.errors import GrammarFailed
from engine_worker.model.logprobs import with_logprobs
from engine_worker.model.sampler_draw import Draw, draw_tokens, likeliest, new_key, seeded_key
from engine_worker.model.sampler_logits import BadWords, Edits, TokenHistory, outside_of
from engine_worker.model.sampler_plain import PlainRequests, has_penalties, needs_state
from engine_worker.model.sampler_rows import Row, Rows, rows_of

if TYPE_CHECKING:  # needs llguidance, which an engine without structured output can do without
    from engine_worker.model.token_masks import TokenMasks


@dataclass(slots=True)
class _RequestState:
    """`key` seeds the draws; `history` counts tokens for the penalties; `bias` is logit_bias as tensors.

    `forbidden` are EOS and stop ids, while min_tokens holds; `disallowed` [V] is -inf outside allowed_token_ids (a
    grammar's masks have that in them).
    """

    key: bytes
    history: TokenHistory | None
    bias: tuple[Tensor, Tensor] | None
    forbidden: Tensor | None
    bad_words: BadWords | None
    disallowed: Tensor | None


class Sampler:
    """Samples a token for each segment, and more of them where drafts were right.

    `vocab_size` is the width of the logits. `eos_token_ids` are what min_tokens forbids, with the request's own stop
    ids. Without `masks`, requests with a grammar fail. Logits may live on any device; what comes back is plain Python.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
        masks: TokenMasks | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(id for id in eos_token_ids if 0 <= id < vocab_size))
        self.device = torch.device(device)
        self._masks = masks
        self._states: dict[str, _RequestState] = {}
        self._completed: set[str] = set()
        self._following: dict[str, tuple[SampledToken, ...]] = {}
        self._buffer: Tensor | None = None
        self._plain = PlainRequests()

    def prepare(self, segments: Iterable[Segment]) -> None:
        """Begin, beside the model's work, what sampling these segments in this step or a later one will need."""
        if self._masks is not None:
            self._masks.prepare(segments)

    def sample(
        self, logits: Tensor, segments: Sequence[Segment], found: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """One token for each segment. logits: [R, V] float32, segment.num_rows rows for each in order; not changed.
        `found` is what `likeliest` would say of them, where that is known.

        Returns the tokens by request id, and a sentence by request id for each that failed. `following` has the tokens
        that come behind these where drafts were right, `completed` who is at the end of a grammar.
        """
        if found is not None and self._plain.covers(segments) and np.isfinite(found[0]).all():
            self._completed.clear()
            self._following = {}
            ids = found[1].tolist()
            return {s.request.request_id: SampledToken(i) for s, i in zip(segments, ids, strict=True)}, {}
        groups = rows_of(segments)
        assert logits.shape == (sum(len(g.rows) for g in groups), self.vocab_size), (logits.shape, self.vocab_size)
        self._completed.clear()
        self._following = {}
        if not segments:
            return {}, {}
        failed: dict[str, str] = {}
        # [R], [R]: greedy's answer, and NaN or inf wherever a row is not sound
        best, ids = likeliest(logits) if found is None else map(torch.from_numpy, found)
        sound = torch.isfinite(best).tolist()
        for group in groups:
            request_id = group.request.request_id
            group.num_usable = next((row.number for row in group.rows if not sound[row.index]), group.num_usable)
            problem = self._admit(group.request) if group.num_usable else UNSOUND
            if problem:
                failed[request_id] = problem
        chosen = ids.tolist()
        self._choose_special(
            logits, [group for group in groups if group.request.request_id not in failed], chosen, failed
        )
        verified = [group.verified(chosen) for group in groups if group.request.request_id not in failed]
        self._accept(verified, chosen, failed)
        return self._results(
            logits, [rows for rows in verified if rows[0].request.request_id not in failed], chosen
        ), failed

    def propose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """What each row would bring, were these the model's logits: a draft model's guesses at what `sample` will say.

        Rows draw with the noise that `sample` will use in their place, so that two like distributions mostly agree. A
        grammar's masks are left out: a guess that breaks the grammar is refused later.
        """
        best, ids = likeliest(logits)
        chosen, sound = ids.tolist(), torch.isfinite(best).tolist()
        special = [row for row in rows if sound[row.index] and self._admit(row.request) is None]
        special = [row for row in special if row.request.request_id in self._states]
        self._choose(logits, special, chosen, {})
        return chosen

    def noise_key(self, request: Request) -> bytes | None:
        """What seeds the draws of a request that runs ahead (core/ahead.py); None where it takes the likeliest."""
        problem = self._admit(request)
        assert problem is None, "a request that names tokens doesn't run ahead"
        return None if request.params.is_greedy else self._states[request.request_id].key

    def release(self, request_id: str) -> None:
        """Forget a request. Unknown ids are fine."""
        self._states.pop(request_id, None)
        self._plain.release(request_id)
        if self._masks is not None:
            self._masks.release(request_id)

    @property
    def completed(self) -> frozenset[str]:
        """Of the requests in the last call of `sample`, those whose grammar allows nothing more."""
        return frozenset(self._completed)

    @property
    def following(self) -> dict[str, tuple[SampledToken, ...]]:
        """Of the requests in the last call of `sample` with drafts that were right, the tokens behind the first."""
        return self._following

    @property
    def num_states(self) -> int:
        """Requests that something is remembered of."""
        return len(self._states) + len(self._plain)

    def check_invariants(self) -> None:
        for state in self._states.values():
            if state.history is not None:
                state.history.check_invariants()

    # ---- one request's state

    def _admit(self, request: Request) -> str | None:
        """Make the request's state if it needs one. A sentence if its ids are not in the vocabulary."""
        params = request.params
        if request.request_id in self._states or not needs_state(params):
            return None
        if params.grammar and self._masks is None:
            return "This worker can't constrain its output (its start-up log says why)."
        named = [*params.allowed_token_ids, *(id for id, _ in params.logit_bias)]
        if params.min_tokens:
            named += params.stop_token_ids
        outside = [id for id in named if not 0 <= id < self.vocab_size]
        if outside:
            return Refusal(f"Token id {outside[0]} is outside the vocabulary: 0 to {self.vocab_size - 1}.")
        self._states[request.request_id] = self._new_state(request)
        return None

    def _new_state(self, request: Request) -> _RequestState:
        params = request.params
        bias = None
        if params.logit_bias:
            totals: dict[int, float] = {}
            for token_id, value in params.logit_bias:
                totals[token_id] = totals.get(token_id, 0.0) + value
            bias = (torch.tensor(list(totals)), torch.tensor(list(totals.values()), dtype=torch.float32))
        forbidden = None
        if params.min_tokens:
            forbidden = torch.tensor(sorted({*self.eos_token_ids, *params.stop_token_ids}), dtype=torch.int64)
        return _RequestState(
            key=new_key() if params.seed is None else seeded_key(params.seed),
            history=TokenHistory(params) if has_penalties(params) else None,
            bias=bias,
            forbidden=forbidden,
            bad_words=BadWords(params.bad_words) if params.bad_words else None,
            disallowed=(
                outside_of(params.allowed_token_ids, self.vocab_size)
                if params.allowed_token_ids and not params.grammar
                else None
            ),
        )

    # ---- the batch

    def _choose_special(self, logits: Tensor, groups: list[Rows], chosen: list[int], failed: dict[str, str]) -> None:
        """Overwrite `chosen` for every row that plain argmax does not answer."""
        special = [group for group in groups if group.request.request_id in self._states]
        masks = self._take_masks(special, failed)
        special = [group for group in special if group.request.request_id not in failed]
        empty = self._choose(logits, [row for group in special for row in group.usable], chosen, masks)
        for group in special if empty else ():
            group.num_usable = next((row.number for row in group.usable if row.index in empty), group.num_usable)
            if not group.num_usable:
                failed[group.request.request_id] = _NOTHING_LEFT

    def _choose(
        self, logits: Tensor, rows: Sequence[Row], chosen: list[int], masks: Mapping[str, Sequence[Tensor]]
    ) -> set[int]:
        """Choose a token for each of these rows of the logits, all of requests with a state. Returns those without."""
        if not rows:
            return set()
        work = self._copy(logits, [row.index for row in rows])  # [S, V]: the raw ones are for logprobs
        self._edit(work, rows, masks)
        best, ids = likeliest(work)
        sound, greedy_ids = torch.isfinite(best).tolist(), ids.tolist()
        draws: list[Draw] = []
        for i, row in enumerate(rows):
            chosen[row.index] = greedy_ids[i]
            if sound[i] and not row.request.params.is_greedy:
                key = self._states[row.request.request_id].key
                draws.append(Draw(index=i, key=key, position=len(row.output_ids), params=row.request.params))
        if draws:
            for draw, token_id in zip(draws, draw_tokens(work, best, draws), strict=True):
                chosen[rows[draw.index].index] = token_id
        return {row.index for i, row in enumerate(rows) if not sound[i]}

    def _copy(self, logits: Tensor, rows: list[int]) -> Tensor:
        """These rows of the logits, on a CPU in a buffer that is kept: fresh memory costs more than the copy."""
        index = torch.tensor(rows, device=logits.device)
        if logits.device.type != "cpu":
            return logits[index]
        if self._buffer is None or len(self._buffer) < len(rows):
            self._buffer = torch.empty(len(rows), self.vocab_size)
        return torch.index_select(logits, 0, index, out=self._buffer[: len(rows)])

    def _take_masks(self, groups: Sequence[Rows], failed: dict[str, str]) -> dict[str, list[Tensor]]:
        """Masks [V] of the requests with a grammar, one a row. Drafts end where they break it."""
        masks: dict[str, list[Tensor]] = {}
        if self._masks is None:
            return masks
        constrained = [group for group in groups if group.request.params.grammar]
        self._masks.prepare([group.segment for group in constrained])
        for group in constrained:
            try:
                masks[group.request.request_id] = found = self._masks.take(group.request)
                group.num_usable = min(group.num_usable, len(found))
            except GrammarFailed as error:
                failed[group.request.request_id] = Refusal(error)
        return masks

    def _accept(self, verified: Sequence[tuple[Row, ...]], chosen: list[int], failed: dict[str, str]) -> None:
        """Tell the grammars what was chosen."""
        for rows in verified:
            request = rows[0].request
            if not request.params.grammar:
                continue
            assert self._masks is not None
            try:
                if self._masks.accept(request, [chosen[row.index] for row in rows]):
                    self._completed.add(request.request_id)
            except GrammarFailed as error:
                failed[request.request_id] = Refusal(error)

    def _edit(self, work: Tensor, rows: Sequence[Row], masks: Mapping[str, Sequence[Tensor]]) -> None:
        """Penalties, then logit_bias, then the masks, in place on work [S, V]."""
        edits = Edits(work)
        for index, row in enumerate(rows):
            request, num_output = row.request, len(row.output_ids)
            state = self._states[request.request_id]
            if state.history is not None:
                state.history.follow(request.prompt_ids, request.output_ids)
                edits.penalize(index, state.history.ahead(row.output_ids[len(request.output_ids) :]))
            if state.bias is not None:
                edits.add(index, *state.bias)
            if state.forbidden is not None:
                if len(request.output_ids) >= request.params.min_tokens:
                    state.forbidden = None
                elif num_output < request.params.min_tokens and not self._is_over(row, masks):
                    edits.forbid(index, state.forbidden)
            if state.bad_words is not None:
                edits.forbid(index, state.bad_words.next_ids(row.output_ids))
            found = masks.get(request.request_id)
            mask = state.disallowed if found is None else found[row.number]
            if mask is not None:
                edits.mask(index, mask)
        edits.apply()

    def _is_over(self, row: Row, masks: Mapping[str, Sequence[Tensor]]) -> bool:
        """A complete grammar ends the output even below min_tokens: there is nothing else to say."""
        return (
            self._masks is not None and row.request.request_id in masks and self._masks.is_over(row.request, row.number)
        )

    def _results(
        self, logits: Tensor, verified: Sequence[tuple[Row, ...]], chosen: list[int]
    ) -> dict[str, SampledToken]:
        tokens = {row.index: SampledToken(chosen[row.index]) for rows in verified for row in rows}
        wanted = [row for rows in verified for row in rows if row.request.params.num_logprobs is not None]
        if wanted:
            counts = [row.request.params.num_logprobs or 0 for row in wanted]
            index = [row.index for row in wanted]
            raw = logits if len(wanted) == len(logits) else logits[torch.tensor(index, device=logits.device)]
            tokens.update(zip(index, with_logprobs(raw, [chosen[i] for i in index], counts), strict=True))
        for rows in verified:
            if len(rows) > 1:
                self._following[rows[0].request.request_id] = tuple(tokens[row.index] for row in rows[1:])
        return {rows[0].request.request_id: tokens[rows[0].index] for rows in verified}


UNSOUND = (
    "The model's logits for this request are not finite (NaN or infinite). Other requests go on; if this repeats, "
    "load the model with --dtype float32."
)
_NOTHING_LEFT = Refusal(
    "logit_bias, min_tokens, bad words, allowed token ids and the output's grammar together leave no token that could "
    "be chosen; loosen one of them."
)
