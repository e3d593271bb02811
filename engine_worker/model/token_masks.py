"""Which tokens a request may put out next: its grammar and its allowed ids, as a mask over the vocabulary.

A grammar is llguidance's: a matcher that follows the output token by token and says which tokens may come next. Its
masks depend on tokens only, never on logits. So the mask for the next step is computed in a thread of its own as soon
as this step's token is known, while the engine commits, plans and runs the model (llguidance lets go of the interpreter
lock); the sampler finds it ready. A mask is a row of 0 and -inf to add to the logits: adding takes an eighth of the
time of filling by booleans.

A matcher follows `request.output_ids`, whatever happened to the request in between. Preempted and resumed, it stands
where it stood. With speculation it runs ahead: one job makes the mask behind the output and one behind each speculated
token, up to the first that the grammar forbids. Where these were refused it rolls back to the common beginning.

The matcher's first sight of a grammar costs from below a millisecond to some ten; compiled grammars are kept and copied
for the next request, a copy costs microseconds. What a grammar may cost is bounded (config.GRAMMAR_LIMITS and
llguidance's own limits): beyond, the request fails alone with a sentence.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from engine_worker.config import GRAMMAR_LIMITS
from engine_worker.core.types import Request, Segment
from engine_worker.model.errors import GrammarFailed

MAX_COMPILED = 128  # grammars kept for the next request that brings them
MAX_COMPILED_CHARS = 8_000_000  # and their size in all, as text

Bits = npt.NDArray[np.uint8]  # a vocabulary as bytes, a bit for each token, lowest first


class _State:
    """One request's matcher and the mask being made for it. `matcher` is touched by one thread at a time: the worker's
    until `mask` is done, then the engine's.

    consumed   the output and speculated tokens that the matcher has seen
    masks_for  the output tokens that `masks` begin behind, and the speculated ones that they follow
    is_over    for each mask: nothing but the end may come
    """

    def __init__(self, allowed: Bits | None) -> None:
        self.matcher: LLMatcher | None = None
        self.consumed: list[int] = []
        self.masks_for: tuple[list[int], tuple[int, ...]] = ([], ())
        self.masks: Future[list[Tensor]] | None = None  # gives [V] float32, each
        self.floats: list[Tensor] = []
        self.is_over: list[bool] = []
        self.allowed = allowed  # or None for all


class TokenMasks:
    """Makes masks for one vocabulary. Use from the engine's thread; call `close` when done.

    `vocab_size` is the logits' width; ids beyond the tokenizer's own vocabulary are never allowed by a grammar.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self._vocab_size = vocab_size
        self._floats = _floats_of_bytes().to(device)
        self._eos = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        # A matcher needs some end token. A model without one ends where its grammar does, and never samples this.
        self._tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=self._eos or [_some_special_id(tokenizer_json)]
        )
        self._limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiled_chars = 0
        self._states: dict[str, _State] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-masks")

    def prepare(self, segments: Iterable[Segment]) -> None:
        """Have the masks of those that need some made, unless they are. Returns at once."""
        for segment in segments:
            request, drafts = segment.request, segment.draft_ids
            if not request.params.grammar:
                continue
            state = self._states.get(request.request_id)
            if state is None:
                state = self._states[request.request_id] = _State(_allowed(request, self._vocab_size))
            behind, followed = state.masks_for
            if state.masks is None or behind != request.output_ids:
                self._submit(state, request, list(request.output_ids), drafts)
            elif followed != drafts:
                self._submit(state, request, behind, drafts, None if followed else state.masks)

    def take(self, request: Request) -> list[Tensor]:
        """Masks [V] float32 to add to logits: -inf for what may not come next. Waits for them. Raises GrammarFailed.

        The first stands behind the output, the others behind one speculated token more each, as far as these may come.
        """
        state = self._states[request.request_id]
        assert state.masks is not None, "take before prepare"
        return state.masks.result()

    def is_over(self, request: Request, number: int = 0) -> bool:
        """Whether this one of the masks that `take` gave allows nothing but the end."""
        return self._states[request.request_id].is_over[number]

    def accept(self, request: Request, token_ids: Sequence[int]) -> bool:
        """These tokens were sampled under the masks. Begins the next one. True if nothing may follow the last token."""
        state, output_ids = self._states[request.request_id], request.output_ids
        assert state.matcher is not None
        assert state.consumed[: len(output_ids)] == output_ids, "the matcher has lost its request"
        state.masks = None
        if token_ids[-1] in self._eos:
            return state.is_over[len(token_ids) - 1]
        _follow(state, [*output_ids, *token_ids])
        if state.matcher.is_stopped():
            _check(state.matcher)
            return True
        if len(state.consumed) < request.params.max_tokens:
            self._submit(state, request, list(state.consumed))
        return False

    def release(self, request_id: str) -> None:
        """Idempotent. A mask under way is dropped when it is done."""
        self._states.pop(request_id, None)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def num_states(self) -> int:
        return len(self._states)

    # -- in the thread

    def _submit(
        self,
        state: _State,
        request: Request,
        output_ids: list[int],
        drafts: tuple[int, ...] = (),
        first: Future[list[Tensor]] | None = None,
    ) -> None:
        """Have the masks made behind `output_ids` and behind each draft. `first` gives the former, where it is made."""
        params = request.params

        def job() -> list[Tensor]:
            if state.matcher is None:
                state.matcher = self._matcher(params.grammar)
            masks = first.result() if first is not None else []
            _follow(state, output_ids)
            if not masks:
                state.is_over.clear()
                masks = [self._mask(state, params.ignore_eos, 0)]
            for draft_id in drafts:
                if draft_id in self._tokenizer.eos_tokens or not state.matcher.validate_tokens([draft_id]):
                    break
                state.matcher.consume_token(draft_id)
                state.consumed.append(draft_id)
                if state.matcher.is_stopped():
                    break
                masks.append(self._mask(state, params.ignore_eos, len(masks)))
            return masks

        state.masks_for = (output_ids, drafts)
        state.masks = self._thread.submit(job)  # one thread: behind this request's earlier ones

    def _matcher(self, grammar: str) -> LLMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            _check(compiled)
            self._compiled[grammar] = compiled
            self._compiled_chars += len(grammar)
            while len(self._compiled) > MAX_COMPILED or self._compiled_chars > MAX_COMPILED_CHARS:
                self._compiled_chars -= len(self._compiled.popitem(last=False)[0])
        else:
            self._compiled.move_to_end(grammar)
        return compiled.deep_copy()

    def _mask(self, state: _State, ignore_eos: bool, number: int) -> Tensor:
        assert state.matcher is not None
        known = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
        _check(state.matcher)
        bits = np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)
        bits[: len(known)] = known[: len(bits)]
        ends = [token_id for token_id in self._tokenizer.eos_tokens if _has(bits, token_id)]
        if state.allowed is not None:
            bits &= state.allowed
        _clear(bits, ends)
        state.is_over.append(not bits.any())
        if state.is_over[number] or (self._eos and not ignore_eos):
            _set(bits, ends)
        if number == len(state.floats):  # buffers are used again: the engine has added the last masks by then
            state.floats.append(torch.empty(len(bits), 8, device=self._floats.device))
        index = torch.from_numpy(bits).to(self._floats.device).int()
        torch.index_select(self._floats, 0, index, out=state.floats[number])
        return state.floats[number].view(-1)[: self._vocab_size]


def _floats_of_bytes() -> Tensor:
    """[256, 8] float32: a byte's bits, lowest first, as 0 for one and -inf for zero."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf)))


def _has(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def _set(bits: Bits, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)


def _clear(bits: Bits, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


def _follow(state: _State, wanted: list[int]) -> None:
    """Bring the matcher to the end of these output tokens, back first if it has seen others."""
    matcher = state.matcher
    assert matcher is not None
    if state.consumed == wanted:
        return
    common = 0
    for seen, token_id in zip(state.consumed, wanted, strict=False):
        if seen != token_id:
            break
        common += 1
    num_back = len(state.consumed) - common
    if num_back and not matcher.rollback(num_back):
        _check(matcher)
    state.consumed = list(wanted)
    if not matcher.consume_tokens(wanted[common:]):
        _check(matcher)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().strip().splitlines()
        raise GrammarFailed(f"The grammar or schema of this request can't be followed: {(reason or ['?'])[0][:300]}.")


def _allowed(request: Request, vocab_size: int) -> Bits | None:
    ids = request.params.allowed_token_ids
    if not ids:
        return None
    allowed = np.zeros(vocab_size, dtype=np.uint8)
    allowed[list(ids)] = 1
    return np.packbits(allowed, bitorder="little")


def _some_special_id(tokenizer_json: str) -> int:
    spec: dict[str, Any] = json.loads(tokenizer_json)
    added = [token["id"] for token in spec.get("added_tokens") or [] if token.get("special")]
    return int(added[0]) if added else 0
