"""Speculation changes no output: seeded answers stay what they are, unseeded ones keep their distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from engine_worker.core.types import BlockId, FinishReason, Request, SamplingParams, Segment
from engine_worker.model.sampler import Sampler
from engine_worker.model.sampler_rows import Row
from engine_worker.model.token_masks import TokenMasks
from tests.engine_worker.model.sampling import chi_square, reference_distribution
from tests.engine_worker.model.serving import Answer, TinyEngine
from tests.engine_worker.model.test_constrained_engine import MODULE, SCHEMAS, TOKENIZER, VOCAB, params_of, run_all

pytestmark = pytest.mark.engine

PROMPT = list(range(5, 16))


@pytest.fixture(scope="module")
def masks() -> Iterator[TokenMasks]:
    made = TokenMasks(TOKENIZER.to_str(), VOCAB, [])
    yield made
    made.close()


def spoiling(answers: Sequence[Answer], prompts: Sequence[Sequence[int]]) -> Callable[[Request, int], list[int]]:
    """Guesses these answers, with a token spoilt now and then."""
    known = {
        (tuple(prompt), i): answer.token_ids for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    }
    rng = random.Random(3)

    def guess(request: Request, most: int) -> list[int]:
        index = int(request.request_id[1:])
        begin = len(request.output_ids)
        coming = known[request.prompt_ids, index][begin : begin + most]
        return [token_id if rng.random() < 0.8 else rng.randrange(VOCAB) for token_id in coming]

    return guess


PARAMS: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "temperature": 1.7, "top_k": 12, "top_p": 0.9},
    {"seed": 3, "min_p": 0.02, "repetition_penalty": 1.4},
    {"seed": 4, "frequency_penalty": 0.7, "presence_penalty": 0.4, "num_logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "num_logprobs": 2},
    {"seed": 6, "logit_bias": ((9, 4.0), (11, 3.0)), "bad_words": ((9, 11), (12,))},
    {"seed": 7, "stop_token_ids": (9, 10, 11, 12), "min_tokens": 9, "logit_bias": ((9, 3.0), (10, 3.0))},
    {"seed": 8, "allowed_token_ids": tuple(range(7, 30))},
]


@pytest.mark.parametrize("kwargs", [{}, {"budget": 40, "num_blocks": 22}], ids=["roomy", "crowded"])
def test_answers_of_all_parameters_stay(kwargs: dict[str, Any]) -> None:
    """Penalties, filters, masks, stops and logprobs, each at its own position of the guesses."""
    jobs = [([*PROMPT, i], SamplingParams(max_tokens=24, **params)) for i, params in enumerate(PARAMS)]
    plain = run_all(TinyEngine(MODULE), jobs)
    assert plain[6].finish_reason is FinishReason.STOP
    assert len(plain[6].token_ids) > 9
    engine = TinyEngine(MODULE, guess=spoiling(plain, [prompt for prompt, _ in jobs]), **kwargs)
    found = run_all(engine, jobs)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in plain]
    for ours, theirs in zip(found, plain, strict=True):
        assert [t.logprob for t in ours.tokens] == pytest.approx([t.logprob for t in theirs.tokens], abs=1e-4)
        assert [[i for i, _ in t.top_logprobs] for t in ours.tokens] == [
            [i for i, _ in t.top_logprobs] for t in theirs.tokens
        ]
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert engine.num_steps < 0.7 * sum(len(answer.token_ids) for answer in plain)
    assert bool(kwargs) == (stats.num_preemptions > 0)


@pytest.mark.parametrize("kwargs", [{}, {"budget": 9, "num_blocks": 30}], ids=["roomy", "crowded"])
def test_grammars_follow_guesses_and_come_back(masks: TokenMasks, kwargs: dict[str, Any]) -> None:
    """Guesses that are right, wrong but allowed, and forbidden; grammars that end among the guesses."""
    jobs = [(PROMPT[: 3 + i], params_of(schema, seed=i)) for i, schema in enumerate(SCHEMAS * 2)]
    jobs = [(prompt, params) for prompt, params in jobs]

    def engine_of(**more: Any) -> TinyEngine:
        engine = TinyEngine(MODULE, **more)
        engine.sampler._masks = masks
        return engine

    plain = run_all(engine_of(), jobs)
    engine = engine_of(guess=spoiling(plain, [prompt for prompt, _ in jobs]), **kwargs)
    found = run_all(engine, jobs)
    assert [(a.token_ids, a.finish_reason, a.error) for a in found] == [
        (a.token_ids, a.finish_reason, a.error) for a in plain
    ]
    assert {answer.finish_reason for answer in plain} >= {FinishReason.STOP}
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert masks.num_states == 0


def drafted(name: str, draft_ids: tuple[int, ...], **params: Any) -> Segment:
    request = Request(
        request_id=name, prompt_ids=(1, 2), params=SamplingParams(max_tokens=100, **params), arrival_s=0.0
    )
    request.draft_ids = draft_ids
    return Segment(request, 1, (2, *draft_ids), (BlockId(0),), sample=True, num_drafts=len(draft_ids))


NUM_DRAWS = 4000
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.6, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 0.7},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("draft_id", [0, 3])
def test_distribution_is_the_models_own(params: dict[str, Any], draft_id: int) -> None:
    """A likely and an unlikely guess: the token in its place, and the one behind it, are drawn as without it."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 8, generator=generator) * 1.5
    logits[0, 0] = 2.5
    sampler = Sampler(8, (), "cpu")
    segments = [drafted(f"r{i}", (draft_id,), seed=i, **params) for i in range(NUM_DRAWS)]
    tokens, failed = sampler.sample(logits.repeat(NUM_DRAWS, 1), segments)
    assert not failed
    first = torch.bincount(torch.tensor([token.token_id for token in tokens.values()]), minlength=8)
    assert len(sampler.following) == first[draft_id]
    behind = torch.bincount(
        torch.tensor([t[0].token_id for t in sampler.following.values()], dtype=torch.int64), minlength=8
    )
    for counts, row in ((first, logits[0]), (behind, logits[1])):
        if int(counts.sum()) > 50:
            statistic, freedom = chi_square(counts, reference_distribution(row, SamplingParams(max_tokens=1, **params)))
            assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 3, (counts, statistic, freedom)


def test_a_sampler_that_trusts_its_first_guess_is_told_apart() -> None:
    """Control: were the guess taken unseen, the statistic would be off the scale."""
    logits = torch.zeros(1, 8)
    statistic, freedom = chi_square(torch.tensor([4000] + [0] * 7), logits[0].double().softmax(-1))
    assert statistic > 100 * freedom


def test_a_draft_model_with_the_same_noise_agrees_as_often_as_promised() -> None:
    """The Gumbel coupling: two distributions at distance d agree with chance (1 - d) / (1 + d) or more."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(8, generator=generator)
    draft = target + 0.5 * torch.randn(8, generator=generator)
    distance = float((target.softmax(-1) - draft.softmax(-1)).abs().sum() / 2)
    assert 0.1 < distance < 0.4
    sampler = Sampler(8, (), "cpu")
    segments = [drafted(f"r{i}", (), seed=i) for i in range(NUM_DRAWS)]
    rows = [Row(i, segment.request, segment.request.output_ids) for i, segment in enumerate(segments)]
    guesses = sampler.propose(draft.repeat(NUM_DRAWS, 1), rows)
    tokens, _ = sampler.sample(target.repeat(NUM_DRAWS, 1), segments)
    agreed = sum(tokens[f"r{i}"].token_id == guess for i, guess in enumerate(guesses)) / NUM_DRAWS
    assert (1 - distance) / (1 + distance) - 0.03 < agreed <= 1 - distance + 0.03
    statistic, freedom = chi_square(torch.bincount(torch.tensor(guesses), minlength=8), draft.double().softmax(-1))
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_logits_that_are_not_finite_behind_a_guess_cost_only_what_lies_behind() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 4] = 9.0
    logits[2, 1] = torch.nan
    sampler = Sampler(8, (), "cpu")
    tokens, failed = sampler.sample(logits, [drafted("a", (4, 4), temperature=0.0)])
    assert not failed
    assert [tokens["a"].token_id, *(t.token_id for t in sampler.following["a"])] == [4, 4]
    tokens, failed = sampler.sample(logits.flip(0), [drafted("a", (4, 4), temperature=0.0)])
    assert set(failed) == {"a"}
    assert tokens == sampler.following == {}
