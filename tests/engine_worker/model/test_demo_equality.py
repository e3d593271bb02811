"""The demo model in float32: greedy answers equal transformers' own, as a worker loads and serves it by default.

Where the native kernels can be had, that is through them, with every layer fused; elsewhere through torch's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from engine_worker.config import EngineConfig
from engine_worker.core.types import FinishReason
from engine_worker.model import attention
from engine_worker.model.checkpoint import load_checkpoint
from engine_worker.model.load import load_model
from engine_worker.model.native import library as native
from engine_worker.model.packed_model import PackedModel
from tests.engine_worker.model.serving import Answer, TinyEngine, transformers_greedy
from tests.engine_worker.model.test_greedy_equality import MIN_GAP

pytestmark = [pytest.mark.engine, pytest.mark.e2e]

MAX_TOKENS = 20
BLOCK_SIZE = 4
PLENTY = 512  # blocks, beyond what any batch here can use
LOGIT_TOLERANCE = 3e-4
SYSTEM = (
    "<|im_start|>system\nYou are a patient guide of a botanical garden. You answer in short sentences and you never "
    "talk about anything but plants, the weather, and the way to the next greenhouse.<|im_end|>\n"
)
QUESTIONS = (
    "Which of the greenhouses is the warmest?",
    "Why do leaves turn red in autumn? Explain it as you would to a child of eight years.",
    "Give me three facts about moss.",
    "Hello",
)
TEXTS = (
    *(f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS),
    "The first rule of gardening is",
    "def fibonacci(n):\n",
    "Once upon a time, in a valley that no map shows, there lived a clockmaker who",
    "1, 2, 4, 8, 16,",
)


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[PackedModel, list[list[int]], list[Answer]]]:
    """The model as load_model leaves it, the prompts, and transformers' answers out of the checkpoint as it is."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    attention.register()
    config = EngineConfig(
        model="demo", dtype="float32", device="cpu", num_threads=1, max_model_len=1024, kv_cache_memory=1 << 26
    )
    checkpoint = load_checkpoint(config, attention.NAME, lambda message: None)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    expected = [transformers_greedy(checkpoint.module, prompt, MAX_TOKENS, "sdpa") for prompt in prompts]
    del checkpoint
    runner = load_model(config, lambda message: None)
    if native.current() is None:
        assert runner.info.attention_backend == "cpu"
    else:
        assert runner.info.attention_backend == "native"
        assert "30 of 30 layers fused, into one call with embedding and head" in runner.info.detail
    yield runner._model, prompts, expected
    torch.set_num_threads(num_threads)


def assert_equal(answer: Answer, expected: Answer) -> None:
    """Equal tokens, up to one where the reference is undecided, and close logits up to there."""
    for i, (ours, theirs) in enumerate(zip(answer.logits, expected.logits, strict=False)):
        assert float((ours - theirs).abs().max() / theirs.std()) < LOGIT_TOLERANCE
        if answer.token_ids[i] != expected.token_ids[i]:
            best, second = theirs.topk(2).values.tolist()
            assert best - second < MIN_GAP, f"token {i} differs"
            return


@pytest.mark.parametrize(
    ("batch", "budget", "num_blocks", "victim"),
    [
        (1, 16, PLENTY, None),
        (3, 64, PLENTY, None),
        (8, 1 << 20, PLENTY, None),
        (8, 64, 34, None),  # too few blocks: preempted
        (8, 16, 34, 2),  # and a batch-mate cancelled
    ],
    ids=["alone", "three in chunks", "eight at once", "eight, preempted", "eight, preempted, one cancelled"],
)
def test_answers_equal_transformers(
    demo: tuple[PackedModel, list[list[int]], list[Answer]],
    batch: int,
    budget: int,
    num_blocks: int,
    victim: int | None,
) -> None:
    model, prompts, expected = demo
    engine = TinyEngine(
        model.module, backend=model.backend, num_blocks=num_blocks, block_size=BLOCK_SIZE, budget=budget
    )

    def cancel(step: int, ids: list[str]) -> None:
        if victim is not None and step == 9:
            engine.cancel(ids[victim])

    for warm in (False, True):
        answers = engine.run(prompts[:batch], MAX_TOKENS, before_step=cancel)
        for index, (answer, truth) in enumerate(zip(answers, expected, strict=False)):
            assert_equal(answer, truth)
            if index == victim:
                assert answer.finish_reason is None
            else:
                assert answer.finish_reason is FinishReason.LENGTH
                assert len(answer.token_ids) == MAX_TOKENS
        if warm and num_blocks == PLENTY:
            assert answers[0].num_cached_tokens == len(prompts[0]) - 1
        assert engine.kv.num_free_blocks == num_blocks
    assert (engine.scheduler.stats().num_preemptions > 0) == (num_blocks < PLENTY)
