"""A runner without a model, for tests of the serving layer: it answers a prompt with the prompt itself.

Output token i is prompt token i, and after the last one comes the end of sequence. Its "KV cache" holds token ids: each
step writes the segment's ids to its slots, and each sample reads the whole sequence back through the block table. So
a block that was freed too early, shared wrongly or left stale makes the step fail.

Texts in a prompt that make something happen:
    [boom]   the step raises
    [die]    the process kills itself with SIGKILL
    [sick]   the request alone fails
    [slow]   each step with this request takes SLOW_STEP_S
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_worker.config import EngineConfig, ModelInfo
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.types import SampledToken, Segment, StepPlan, StepResult
from engine_worker.model.errors import ModelError

SLOW_STEP_S = 0.02
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a few merges, three special tokens. Emoji take four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|eos|>", "<|start|>", "<|end|>")])
    return tokenizer


def load_fake(config: EngineConfig, progress: Callable[[str], None]) -> FakeRunner:
    if config.model == "missing":
        raise ModelError("There is no model 'missing'; give the folder of one.")
    progress("loading the fake model")
    if config.model.startswith("gate:"):  # loads for as long as there is no such file
        while not os.path.exists(config.model.removeprefix("gate:")):
            time.sleep(0.01)
    return FakeRunner(config)


class FakeRunner:
    def __init__(self, config: EngineConfig) -> None:
        tokenizer = make_tokenizer()
        self.eos = tokenizer.token_to_id("<|eos|>")
        self._marks = {name: tuple(tokenizer.encode(f"[{name}]").ids) for name in ("boom", "die", "sick", "slow")}
        num_blocks = (config.kv_cache_memory or 4096 * 16) // config.block_size  # one byte a token
        self.info = ModelInfo(
            model=config.model,
            architecture="Fake",
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_ids=(self.eos,),
            max_model_len=config.max_model_len or 4096,
            num_layers=1,
            block_size=config.block_size,
            num_blocks=num_blocks,
            kv_block_bytes=config.block_size,
            weight_bytes=10,
            quantization="none at all",
            weight_bytes_saved=7 * config.block_size + 1,
            kv_block_bytes_saved=3,
            dtype="float32",
            device="cpu",
            attention_backend="fake",
            num_threads=1,
            cache_root=b"fake",
            detail="no model at all",
        )
        self.tokenizer = TokenizerBundle(
            fingerprint="fake",
            tokenizer_json=tokenizer.to_str(),
            chat_template=CHAT_TEMPLATE,
            special_tokens={"eos_token": "<|eos|>"},
            max_model_len=self.info.max_model_len,
        )
        self._slots = [-1] * (num_blocks * config.block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        sampled: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        for segment in plan.segments:
            if segment.copy_from is not None:
                self._copy(segment, segment.copy_from)
        for segment in plan.segments:
            self._act(segment)
            self._write(segment)
            if self._has(segment, "sick"):
                failed[segment.request.request_id] = "this request is sick"
            elif segment.sample:
                sampled[segment.request.request_id] = self._sample(segment)
        return StepResult(sampled, failed)

    def release(self, request_id: str) -> None:
        pass

    def _act(self, segment: Segment) -> None:
        if self._has(segment, "boom"):
            raise RuntimeError("boom")
        if self._has(segment, "die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._has(segment, "slow"):
            time.sleep(SLOW_STEP_S)

    def _has(self, segment: Segment, name: str) -> bool:
        mark = self._marks[name]
        ids = segment.request.prompt_ids
        return any(ids[i : i + len(mark)] == mark for i in range(min(len(ids), 64)))

    def _slot(self, segment: Segment, position: int) -> int:
        block_size = self.info.block_size
        return segment.block_ids[position // block_size] * block_size + position % block_size

    def _copy(self, segment: Segment, source: int) -> None:
        size = self.info.block_size
        begin = segment.start // size * size
        for position in range(begin, segment.start):
            self._slots[self._slot(segment, position)] = self._slots[source * size + position - begin]

    def _write(self, segment: Segment) -> None:
        for i, token_id in enumerate(segment.token_ids):
            self._slots[self._slot(segment, segment.start + i)] = token_id

    def _sample(self, segment: Segment) -> SampledToken:
        request = segment.request
        ids = tuple(self._slots[self._slot(segment, position)] for position in range(segment.end))
        assert ids == request.token_ids(0, request.num_tokens), "the cache holds other tokens than the request"
        at = len(request.output_ids)
        token_id = request.prompt_ids[at] if at < len(request.prompt_ids) else self.eos
        if token_id == self.eos and (request.params.ignore_eos or at < request.params.min_tokens):
            token_id = request.prompt_ids[0]
        top = tuple(((token_id + i) % self.info.vocab_size, -0.5 - i) for i in range(request.params.num_logprobs or 0))
        logprob = None if request.params.num_logprobs is None else -0.5
        return SampledToken(token_id, logprob, top)
