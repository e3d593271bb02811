"""Grammars and prompt scores through scheduler, runner and model, crowded, chunked and preempted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from engine_worker.core.types import FinishReason, SamplingParams
from engine_worker.model import attention
from engine_worker.model.token_masks import TokenMasks
from tests.engine_worker.model.serving import Answer, TinyEngine
from tests.engine_worker.model.tiny_models import tiny_model
from tests.engine_worker.serving.fake_engine import make_tokenizer

pytestmark = pytest.mark.engine

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
MODULE = tiny_model("llama", vocab_size=VOCAB)
COMPACT = {"whitespace_flexible": False}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
    | {"additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "hello", None, 3]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-f]{3,12}$"},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {}, "additionalProperties": False}]},
    {"const": {"b": [1, 2.5, "x"]}},
]


@pytest.fixture(scope="module")
def masks() -> Iterator[TokenMasks]:
    made = TokenMasks(TOKENIZER.to_str(), VOCAB, [])
    yield made
    made.close()


def engine_of(masks: TokenMasks, **kwargs: Any) -> TinyEngine:
    engine = TinyEngine(MODULE, **kwargs)
    engine.sampler._masks = masks
    return engine


def params_of(schema: dict[str, Any] | None, **more: Any) -> SamplingParams:
    grammar = "" if schema is None else LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    return SamplingParams(**{"max_tokens": 60, "grammar": grammar, **more})


def run_all(engine: TinyEngine, jobs: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    ids = [engine.add(prompt, params) for prompt, params in jobs]
    answers: dict[str, Answer] = {}
    while engine.scheduler.has_work():
        engine.step(answers)
    return [answers[request_id] for request_id in ids]


def prompts(count: int) -> Iterator[list[int]]:
    for i in range(count):
        yield [5 + (i * 37 + j * 11) % 200 for j in range(7 + i * 5 % 23)]


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Every schema greedy, seeded and seeded hot, and requests without one between them."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "temperature": 2.0, "top_p": 0.9}]
    wanted = [params_of(schema, **kind) for schema, kind in itertools.product(SCHEMAS, kinds)]
    wanted[2:2] = [params_of(None, temperature=0.0, max_tokens=30), params_of(None, seed=1, max_tokens=30)]
    return list(zip(prompts(len(wanted)), wanted, strict=True))


def test_outputs_follow_their_schemas_however_they_are_run(masks: TokenMasks) -> None:
    work = jobs()
    alone = [run_all(engine_of(masks), [job])[0] for job in work]
    for (_, params), answer in zip(work, alone, strict=True):
        if params.grammar:
            assert answer.finish_reason is FinishReason.STOP
            schema = SCHEMAS[[params_of(s).grammar for s in SCHEMAS].index(params.grammar)]
            jsonschema.validate(json.loads(TOKENIZER.decode(answer.token_ids)), schema)
    for kwargs in ({}, {"budget": 7}, {"budget": 16, "num_blocks": 26, "max_num_seqs": 6}):
        engine = engine_of(masks, **kwargs)
        together = run_all(engine, work)
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        if "num_blocks" in kwargs:
            assert engine.scheduler.stats().num_preemptions > 0
        assert engine.sampler.num_states == 0
    assert masks.num_states == 0


def test_a_cancelled_request_takes_its_mask_with_it(masks: TokenMasks) -> None:
    engine = engine_of(masks)
    request_id = engine.add([5, 6, 7], params_of(SCHEMAS[2], temperature=0.0))
    engine.step({})
    assert masks.num_states == 1
    engine.cancel(request_id)
    assert masks.num_states == 0


def test_bad_words_and_allowed_ids() -> None:
    prompt = [5, 6, 7, 8]
    [free] = run_all(TinyEngine(MODULE), [(prompt, params_of(None, temperature=0.0, max_tokens=12))])
    pair = tuple(free.token_ids[4:6])
    bad = params_of(None, temperature=0.0, max_tokens=12, bad_words=(pair, (free.token_ids[0],)))
    [other] = run_all(TinyEngine(MODULE), [(prompt, bad)])
    assert free.token_ids[0] not in other.token_ids
    assert pair not in itertools.pairwise(other.token_ids)
    few = params_of(None, seed=3, max_tokens=40, allowed_token_ids=(9, 11))
    [narrow] = run_all(TinyEngine(MODULE), [(prompt, few)])
    assert set(narrow.token_ids) == {9, 11}


def expected_scores(prompt: list[int]) -> torch.Tensor:
    """[P - 1] log probabilities of the prompt's tokens behind the first, by one plain forward."""
    MODULE.set_attn_implementation("sdpa")
    try:
        logits = MODULE(torch.tensor([prompt]), use_cache=False).logits[0].float()
    finally:
        MODULE.set_attn_implementation(attention.NAME)
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@pytest.mark.parametrize("kwargs", [{}, {"budget": 6}, {"budget": 9, "num_blocks": 20, "max_num_seqs": 6}], ids=str)
def test_prompt_scores_are_the_models_own(kwargs: dict[str, Any]) -> None:
    engine = TinyEngine(MODULE, **kwargs)
    params = SamplingParams(max_tokens=25, temperature=0.0, num_prompt_logprobs=3)
    work = [
        (prompt, params if i % 3 else replace(params, num_prompt_logprobs=None)) for i, prompt in enumerate(prompts(9))
    ]
    run_all(engine, [(prompt, replace(params, num_prompt_logprobs=None)) for prompt, _ in work])  # a warm cache
    found = engine.record_prompt_scores()
    ids = [engine.add(prompt, wanted) for prompt, wanted in work]
    answers: dict[str, Answer] = {}
    while engine.scheduler.has_work():
        engine.step(answers)
    for request_id, (prompt, wanted) in zip(ids, work, strict=True):
        scores = found[request_id]
        if wanted.num_prompt_logprobs is None:
            assert scores == []
            continue
        assert [score.token_id for score in scores] == prompt[1:]
        torch.testing.assert_close(
            torch.tensor([score.logprob for score in scores]), expected_scores(prompt), atol=1e-3, rtol=0
        )
        for score in scores:
            assert len(score.top_logprobs) == 3
            assert score.rank is not None
            assert (score.rank == 1) == (score.top_logprobs[0][0] == score.token_id)
        assert answers[request_id].num_cached_tokens == 0
