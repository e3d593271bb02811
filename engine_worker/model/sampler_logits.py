"""Changing logits before a draw: penalties over a request's tokens, logit_bias, and forbidden tokens.

Each of them touches few of the vocabulary's entries, so an edit is a list of (row, token id, value), gathered over the
whole batch and applied with one gather and one scatter, whatever the number of requests.

    repetition penalty r  (prompt and output tokens)   l = l / r if l > 0 else l * r        Keskar et al. 2019 (CTRL)
    frequency penalty f   (output tokens)              l = l - f * count
    presence penalty p    (output tokens)              l = l - p * (count > 0)              OpenAI's API
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Distinct tokens and how often each was put out, for these penalties."""

    params: SamplingParams
    ids: Tensor
    counts: Tensor


class TokenHistory:
    """The distinct tokens of one request and how often each was put out, kept up to date token by token.

    `ids` and `counts` are views of growing buffers on the CPU; a prompt token that was not put out has count 0. Prompt
    tokens are kept only for the repetition penalty, the one penalty that sees them.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._reset()

    def _reset(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = torch.empty(64, dtype=torch.int64)
        self._counts = torch.zeros(64, dtype=torch.float32)
        self._num_prompt = 0
        self._num_output = 0

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        return self._counts[: len(self._slots)]

    def follow(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Take in what was added since the last call. Output that was taken back starts the count anew."""
        if len(output_ids) < self._num_output:
            self._reset()
        if self.params.repetition_penalty != 1 and self._num_prompt == 0:
            for token_id in dict.fromkeys(prompt_ids):
                self._slot(token_id)
            self._num_prompt = len(prompt_ids)
        if self._num_output < len(output_ids):
            for token_id in output_ids[self._num_output :]:
                slot = self._slot(token_id)  # first: it may put larger buffers in place
                self._counts[slot] += 1
            self._num_output = len(output_ids)

    def ahead(self, more_ids: Sequence[int]) -> TokenCounts:
        """The counts as they would be with `more_ids` behind the output, which stays as it is."""
        if not more_ids:
            return TokenCounts(self.params, self.ids, self.counts)
        new = [token_id for token_id in dict.fromkeys(more_ids) if token_id not in self._slots]
        slots = {token_id: len(self._slots) + i for i, token_id in enumerate(new)}
        counts = torch.cat([self.counts, torch.zeros(len(new))])
        for token_id in more_ids:
            counts[slots[token_id] if token_id in slots else self._slots[token_id]] += 1
        return TokenCounts(self.params, torch.cat([self.ids, torch.tensor(new, dtype=torch.int64)]), counts)

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = torch.cat([self._ids, torch.empty_like(self._ids)])
                self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] = 0
        return slot

    def check_invariants(self) -> None:
        assert self.ids.tolist() == list(self._slots), "slots out of step with ids"
        assert int(self.counts.sum()) == self._num_output, "counts out of step with the output"


class BadWords:
    """Token sequences that must not appear in the output: the last token of one is forbidden behind the others."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._always = torch.tensor(sorted({word[0] for word in words if len(word) == 1}), dtype=torch.int64)
        self._longer = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]

    def next_ids(self, output_ids: Sequence[int]) -> Tensor:
        """Distinct ids that would complete a word behind this output."""
        ends = {last for head, last in self._longer if list(output_ids[-len(head) :]) == head}
        if not ends:
            return self._always
        return torch.tensor(sorted({*ends, *self._always.tolist()}), dtype=torch.int64)


def outside_of(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """[V] float32 to add to logits: 0 for these ids, -inf for all others."""
    mask = torch.full((vocab_size,), -torch.inf)
    mask[torch.tensor(token_ids, dtype=torch.int64)] = 0
    return mask


class Edits:
    """Edits of one batch of logits [S, V], collected by row and applied in place in the documented order."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._penalties: list[tuple[int, TokenCounts]] = []
        self._biases: list[tuple[int, Tensor, Tensor]] = []
        self._forbidden: list[tuple[int, Tensor]] = []
        self._masks: list[tuple[int, Tensor]] = []

    def penalize(self, row: int, history: TokenCounts) -> None:
        if len(history.ids):
            self._penalties.append((row, history))

    def add(self, row: int, ids: Tensor, values: Tensor) -> None:
        self._biases.append((row, ids, values))

    def forbid(self, row: int, ids: Tensor) -> None:
        if len(ids):
            self._forbidden.append((row, ids))

    def mask(self, row: int, mask: Tensor) -> None:
        """Add `mask` [V], which is 0 or -inf."""
        self._masks.append((row, mask))

    def apply(self) -> None:
        if self._penalties:
            self._apply_penalties()
        if self._biases:
            flat = self._flat([(row, ids) for row, ids, _ in self._biases])
            values = torch.cat([values for _, _, values in self._biases])
            self._logits.view(-1)[flat] += self._put(values)
        if self._forbidden:
            self._logits.view(-1)[self._flat(self._forbidden)] = -torch.inf
        for row, mask in self._masks:  # row by row, so that a row and its mask stay in a core's cache
            self._logits[row].add_(self._put(mask))

    def _apply_penalties(self) -> None:
        flat = self._flat([(row, history.ids) for row, history in self._penalties])  # [N]
        counts = self._put(torch.cat([history.counts for _, history in self._penalties]))
        params = [history.params for _, history in self._penalties]
        lengths = torch.tensor([len(history.ids) for _, history in self._penalties])
        factors = torch.tensor([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params])
        repetition, frequency, presence = self._put(factors.repeat_interleave(lengths, dim=0)).unbind(1)  # [N] each
        values = self._logits.view(-1)[flat]
        values = torch.where(values > 0, values / repetition, values * repetition)
        self._logits.view(-1)[flat] = values - frequency * counts - presence * (counts > 0)

    def _flat(self, items: list[tuple[int, Tensor]]) -> Tensor:
        """Positions in the flattened logits; ids of one row are distinct, so no position comes twice."""
        vocab_size = self._logits.shape[1]
        return self._put(torch.cat([ids + row * vocab_size for row, ids in items]))

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._logits.device, non_blocking=True)
