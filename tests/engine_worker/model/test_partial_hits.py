"""Copied rows give the answers that computed ones do, in every format, in any mix, and with every kind of step.

The reference is transformers' own greedy answer where the cache is dense, and otherwise the same engine without copies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from engine_worker.core.parts import num_common
from engine_worker.core.types import Request, SamplingParams
from engine_worker.model.kv_format import K8V4, KVFormat, choose_format
from engine_worker.model.kv_tensors import KVLayout, KVTensors, LayerShape
from tests.engine_worker.model import test_async_runner
from tests.engine_worker.model.serving import Answer, TinyEngine, transformers_greedy
from tests.engine_worker.model.test_greedy_equality import MIN_GAP, engine_for, largest_error
from tests.engine_worker.model.test_kv_quality import assert_equal as assert_near
from tests.engine_worker.model.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.engine

MAX_TOKENS = 6
SIZE = 16  # tokens of a block
FORMATS = ("auto", "int8", "fp8", "fp4", "k8v4")
CPU = torch.device("cpu")


@cache
def prompts() -> list[list[int]]:
    """Each leaves the one before it at a position of its own: within the first block, at a block's end, in the last."""
    rng = random.Random(3)
    base = [rng.randrange(3, VOCAB) for _ in range(70)]
    found = [base]
    for length in (5, 16, 17, 31, 47, 63, 69):
        found.append([*base[:length], VOCAB - 1 - base[length], *(rng.randrange(3, VOCAB) for _ in range(9))])
    return found


@cache
def reference(family: str) -> list[Answer]:
    return [transformers_greedy(tiny_model(family), prompt, MAX_TOKENS, "eager") for prompt in prompts()]


def logit_error(answer: Answer, truth: Answer) -> float:
    """Of the first token's logits, over their deviation."""
    return float((answer.logits[0] - truth.logits[0]).abs().max() / truth.logits[0].std())


def one_by_one(engine: TinyEngine, texts: Sequence[Sequence[int]]) -> list[Answer]:
    return [engine.run([text], MAX_TOKENS)[0] for text in texts]


@pytest.mark.parametrize("served_by", ["native", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_a_prompt_that_leaves_a_cached_one_anywhere_is_answered_as_if_cold(family: str, served_by: str) -> None:
    engine = engine_for(family, served_by, block_size=SIZE)
    answers = one_by_one(engine, prompts())
    said = [prompt + answer.token_ids[:-1] for prompt, answer in zip(prompts(), answers, strict=True)]
    for number, (answer, truth, prompt) in enumerate(zip(answers, reference(family), prompts(), strict=True)):
        assert largest_error(answer, truth) < 3e-4
        most = max((num_common(other, prompt[:-1]) for other in said[:number]), default=0)
        assert answer.num_cached_tokens == most, "to the token"


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_next_turns_are_answered_as_if_cold_in_every_format(kv_cache_dtype: str) -> None:
    """Three turns, each behind the answer before it: its last block is never full."""
    whole, parts = (
        engine_for("llama", "native", block_size=SIZE, kv_cache_dtype=kv_cache_dtype, enable_partial_hits=on)
        for on in (False, True)
    )
    text = list(prompts()[0][:37])
    for turn in range(3):
        ((expected,), (answer,)) = (engine.run([text], MAX_TOKENS) for engine in (whole, parts))
        assert_near([answer], [expected])
        assert answer.num_cached_tokens == (len(text) - 4 if turn else 0), "all but the last answer's end and 3 words"
        assert expected.num_cached_tokens == (len(text) - 4 if turn else 0) // SIZE * SIZE
        text += [*expected.token_ids, 5 + turn, 6, 7]
    assert parts.scheduler.stats().num_copied_tokens > 0


def test_several_copies_in_one_step() -> None:
    """Choices of one prompt are admitted together; each copies what its leader has of the prompt's last block."""
    engine = engine_for("llama", "native", block_size=SIZE)
    prompt = prompts()[0]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    for number in range(4):
        engine.scheduler.add(
            Request(request_id=f"c{number}", prompt_ids=tuple(prompt), params=params, arrival_s=0.0, leader_id="c0")
        )
    answers: dict[str, Answer] = {}
    while engine.scheduler.has_work():
        engine.step(answers)
    for request_id, answer in answers.items():
        answer.logits = engine.sampler.rows[request_id]
        assert largest_error(answer, reference("llama")[0]) < 3e-4
        assert answer.num_cached_tokens == (0 if request_id == "c0" else len(prompt) - 1)
    assert engine.scheduler.stats().num_copied_tokens == 3 * ((len(prompt) - 1) % SIZE)


def test_steps_queued_behind_each_other_copy_in_time() -> None:
    prompts, params = test_async_runner.PROMPTS, test_async_runner.PARAMS
    engine = TinyEngine(tiny_model("llama"), block_size=8)
    cold, _, _ = test_async_runner.run(engine, is_async=True)
    warm, ends, num_ahead = test_async_runner.run(engine, is_async=True)
    assert num_ahead > 5
    assert [end.num_cached_tokens for end in ends.values()] == [
        len(prompts[int(name.removeprefix("r")) % len(prompts)]) - 1 for name in ends
    ]
    for number in range(len(prompts)):
        if params[number].seed is None:
            ours, before = warm[f"r{number + len(prompts)}"], cold[f"r{number}"]
            assert [token.token_id for token in ours] == [token.token_id for token in before]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp4"])
@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_in_a_pool_that_evicts_all_the_time(seed: int, kv_cache_dtype: str) -> None:
    """Against the same engine without any cache reads: whatever was evicted, preempted or copied in between."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(3, 30))]]
    for _ in range(17):
        kept = rng.choice(texts)[: rng.randint(1, 30)]
        texts.append([*kept, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9)))])
    settings = {"block_size": 8, "budget": 24, "kv_cache_dtype": kv_cache_dtype, "enable_partial_hits": True}
    engine = engine_for("llama", "native", num_blocks=14, **settings)
    found: list[Answer] = []
    for begin in range(0, len(texts), 3):
        found += engine.run(texts[begin : begin + 3], MAX_TOKENS)
    stats = engine.scheduler.stats()
    assert stats.num_copied_tokens > 0
    expected = [engine_for("llama", "native", **settings).run([text], MAX_TOKENS)[0] for text in texts]
    if kv_cache_dtype != "auto":
        assert_near(found, expected)
        return
    for answer, truth in zip(found, expected, strict=True):
        assert largest_error(answer, truth) < 3e-4


# -- the copy itself


def filled(form: KVFormat, num_blocks: int = 6) -> KVTensors:
    kv = KVTensors(3, num_blocks, 4, CPU, KVLayout((LayerShape(2, 32, 16),) * 3, torch.float32, form))
    for layer in range(3):
        key, value = torch.randn(1, 2, 4 * num_blocks, 32), torch.randn(1, 2, 4 * num_blocks, 16)
        kv.write(layer, torch.arange(4 * num_blocks), key, value)
    return kv


@pytest.mark.parametrize("copies", [[(1, 4, 3)], [(1, 4, 3), (0, 5, 1), (1, 2, 2)]], ids=["one", "several"])
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_copy_moves_these_rows_and_no_others_with_their_scales(
    kv_cache_dtype: str, copies: list[tuple[int, int, int]]
) -> None:
    kv = filled(choose_format(kv_cache_dtype, CPU))
    before = [tensor.clone() for layer in range(3) for rows in kv.rows(layer) for tensor in rows.tensors()]
    kv.copy_rows(copies)
    after = [tensor for layer in range(3) for rows in kv.rows(layer) for tensor in rows.tensors()]
    assert len(before) == (6 if kv_cache_dtype == "auto" else 12)
    for old, new in zip(before, after, strict=True):
        for source, target, num_rows in copies:
            old[target * 4 : target * 4 + num_rows] = old[source * 4 : source * 4 + num_rows]
        assert torch.equal(old, new)


def test_rows_that_are_not_finite_keep_their_block_suspect() -> None:
    kv = filled(K8V4)
    bad = torch.full((1, 2, 1, 32), float("nan"))
    kv.write(2, torch.tensor([7]), bad, bad[..., :16])  # the last row of block 1
    kv.copy_rows([(1, 4, 3)])
    kv.check_invariants()
    assert not kv.rows(2)[0].is_finite()[7]
    assert bool(kv.rows(2)[0].is_finite()[16:20].all()), "the bad row is not among those copied"
    kv.copy_rows([(1, 5, 4)])
    kv.check_invariants()
    kv.scrub([1, 4, 5])
    assert not kv.has_polluted_blocks


def test_leftovers_behind_copied_rows_do_no_harm() -> None:
    """A block that held NaN is cleaned before rows are copied into it: masked values are multiplied by 0."""
    engine = TinyEngine(tiny_model("llama"), block_size=SIZE, num_blocks=12)
    engine.run([prompts()[0]], MAX_TOKENS)
    free = [block for block, _ in engine.kv._pool.eviction_order()][:3]
    with torch.inference_mode():
        for layer in range(engine.model.kv.num_layers):
            rows = engine.model.kv.rows(layer)[1].data
            for block in free:
                rows[block * SIZE : (block + 1) * SIZE] = float("nan")
    engine.model.kv._polluted.update(free)
    answer = engine.run([prompts()[4]], MAX_TOKENS)[0]
    assert answer.error is None
    assert answer.num_cached_tokens == 31
    assert largest_error(answer, reference("llama")[4]) < 3e-4


def test_a_copy_that_is_not_made_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the rows missing, answers are others."""
    monkeypatch.setattr(KVTensors, "copy_rows", lambda self, copies: None)
    answers = one_by_one(TinyEngine(tiny_model("llama"), block_size=SIZE), prompts())
    errors = [logit_error(answer, truth) for answer, truth in zip(answers, reference("llama"), strict=True)]
    assert errors[0] < 3e-4, "nothing was cached before it"
    assert sum(error > 0.01 for error in errors) >= 5


def test_the_references_are_decided() -> None:
    """The control: a reference whose best logits are close everywhere would let anything pass."""
    best = [logits.topk(2).values for answer in reference("llama") for logits in answer.logits]
    assert sum(bool(pair[0] - pair[1] > MIN_GAP) for pair in best) > 0.9 * len(best)
