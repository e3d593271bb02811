"""The engine without its processes: the real scheduler, runner and sampler around a model, driven step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from engine_worker.config import ModelInfo
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import FinishReason, Request, RequestUpdate, SampledToken, SamplingParams, Segment
from engine_worker.model.attention import AttentionBackend
from engine_worker.model.backend_cpu import CPUBackend
from engine_worker.model.draft_model import ModelDrafter
from engine_worker.model.families import num_layers
from engine_worker.model.kv_format import choose_format
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.runner import ModelRunner
from engine_worker.model.sampler import Sampler

MAX_MODEL_LEN = 512


class RecordingSampler(Sampler):
    """The real sampler, which also keeps the logits that each request's tokens were chosen from."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, (), device)
        self.rows: dict[str, list[torch.Tensor]] = {}

    def sample(
        self,
        logits: torch.Tensor,
        segments: Sequence[Segment],
        found: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[dict[str, SampledToken], dict[str, str]]:
        tokens, failed = super().sample(logits, segments, found)
        index = 0
        for segment in segments:  # with drafts, only the rows that tokens were taken from
            request_id = segment.request.request_id
            count = 1 + len(self.following.get(request_id, ()))
            self.rows.setdefault(request_id, []).extend(row.clone() for row in logits[index : index + count])
            index += segment.num_rows
        return tokens, failed


@dataclass
class Answer:
    """A request's end: its tokens, the logits before each, and how it ended."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


def transformers_greedy(module: PreTrainedModel, prompt: Sequence[int], max_tokens: int, attention: str) -> Answer:
    """transformers' own greedy answer to one prompt, with its own cache; EOS does not end it."""
    ids = torch.tensor([list(prompt)])
    before = module.config._attn_implementation, module.generation_config.eos_token_id
    module.set_attn_implementation(attention)
    module.generation_config.eos_token_id = None
    try:
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        module.set_attn_implementation(before[0])
        module.generation_config.eos_token_id = before[1]
    token_ids = out.sequences[0, len(prompt) :].tolist()
    assert len(token_ids) == max_tokens
    return Answer(token_ids, [row[0].float() for row in out.logits])


class TinyEngine:
    """Scheduler, cache manager and runner over one model. Invariants of all three are checked after every step."""

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        budget: int = 1 << 20,
        backend: AttentionBackend | None = None,
        max_num_seqs: int = 16,
        check: bool = True,
        guess: Callable[[Request, int], Sequence[int]] | None = None,
        kv_cache_dtype: str = "auto",
        enable_partial_hits: bool = True,
    ) -> None:
        self.drafter: ModelDrafter | None = None
        self.guess = guess  # speculates before each step: (request, most tokens) -> guesses
        vocab_size = module.config.get_text_config().vocab_size
        layers, device = num_layers(module), module.device
        info = ModelInfo(
            model="tiny",
            architecture=type(module).__name__,
            vocab_size=vocab_size,
            eos_token_ids=(),
            max_model_len=MAX_MODEL_LEN,
            num_layers=layers,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_block_bytes=0,
            weight_bytes=0,
            dtype=str(module.dtype),
            device=str(device),
            attention_backend="cpu",
            num_threads=1,
            cache_root=b"tiny",
        )
        bundle = TokenizerBundle(
            fingerprint="", tokenizer_json="", chat_template=None, special_tokens={}, max_model_len=MAX_MODEL_LEN
        )
        kv = KVTensors(layers, num_blocks, block_size, device, format=choose_format(kv_cache_dtype, device))
        self.model = PackedModel(module, backend or CPUBackend(), kv)
        self.sampler = RecordingSampler(vocab_size, device)
        self.runner = ModelRunner(self.model, self.sampler, info, bundle, max_num_seqs)
        self.kv = KVCacheManager(num_blocks, block_size, info.cache_root, enable_partial_hits=enable_partial_hits)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset(),
        )
        self.scheduler = Scheduler(config, self.kv)
        self.check = check
        self.num_steps = 0
        self._num_added = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        request_id = f"r{self._num_added}"
        self._num_added += 1
        self.scheduler.add(
            Request(request_id=request_id, prompt_ids=tuple(prompt), params=params, arrival_s=float(self._num_added))
        )
        return request_id

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        before_step: Callable[[int, list[str]], None] | None = None,
    ) -> list[Answer]:
        """Greedy answers to the prompts, all submitted at once. `before_step(step, ids)` may cancel or add."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        ids = [self.add(prompt, params) for prompt in prompts]
        answers = {request_id: Answer() for request_id in ids}
        step = 0
        while self.scheduler.has_work():
            if before_step is not None:
                before_step(step, ids)
            self.step(answers)
            step += 1
        for request_id, answer in answers.items():
            answer.logits = self.sampler.rows.pop(request_id, [])
        return [answers[request_id] for request_id in ids]

    def step(self, answers: dict[str, Answer]) -> None:
        if self.guess is not None:
            for request, room in self.scheduler.can_speculate(5):
                self.scheduler.speculate(request, tuple(self.guess(request, room)))
        if self.drafter is not None:
            found = [(request, self.scheduler.reserve(request, n)) for request, n in self.scheduler.can_speculate(4)]
            for (request, _), guesses in zip(found, self.drafter.propose(found), strict=True):
                self.scheduler.speculate(request, guesses)
        plan = self.scheduler.plan(float(self.num_steps))
        self.num_steps += 1
        for update in self.scheduler.commit(plan, self.runner.execute(plan)):
            answer = answers.setdefault(update.request_id, Answer())
            if update.token is not None:
                answer.token_ids.append(update.token.token_id)
                answer.tokens.append(update.token)
            answer.num_cached_tokens = update.num_cached_tokens
            if update.finish_reason is not None:
                answer.finish_reason, answer.error = update.finish_reason, update.error
                self.release(update.request_id)
        self.scheduler.take_events()
        if self.check:
            self.scheduler.check_invariants()
            self.runner.check_invariants()
            if self.drafter is not None:
                self.drafter.check_invariants()

    def record_prompt_scores(self) -> dict[str, list[SampledToken]]:
        """Scores of prompts by request, of all requests that run from now on; filled in as they are committed."""
        found: dict[str, list[SampledToken]] = {}
        commit = self.scheduler.commit

        def recording(*arguments: Any) -> list[RequestUpdate]:
            updates = commit(*arguments)
            for update in updates:
                found.setdefault(update.request_id, []).extend(update.prompt_logprobs)
            return updates

        self.scheduler.commit = recording  # type: ignore[method-assign]
        return found

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        self.runner.release(request_id)
        if self.drafter is not None:
            self.drafter.release(request_id)
