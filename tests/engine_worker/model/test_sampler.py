"""The sampler's contract: the right distribution, rows that don't touch each other, history that survives."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from engine_worker.core.types import SamplingParams
from engine_worker.model import sampler_draw
from engine_worker.model.sampler import Sampler
from engine_worker.model.sampler_draw import likeliest
from tests.engine_worker.model.sampling import chi_square, reference_distribution, sample_ids, segment

pytestmark = pytest.mark.engine

VOCAB = 40
EOS = (3, 7)


def make_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, EOS, "cpu")


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# ---- greedy


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1e-6}, {"temperature": 5.0, "top_k": 1}])
def test_greedy_is_argmax_and_keeps_no_state(params: dict[str, Any]) -> None:
    sampler, logits = make_sampler(), random_logits(9)
    segments = [segment(**params) for _ in range(9)]
    assert sample_ids(sampler, logits, segments) == logits.argmax(-1).tolist()
    assert sampler.num_states == 0


def test_no_rows_give_no_tokens() -> None:
    assert make_sampler().sample(torch.empty(0, VOCAB), []) == ({}, {})


def test_logits_are_not_changed() -> None:
    logits = random_logits(3)
    before = logits.clone()
    segments = [
        segment(temperature=0.0, repetition_penalty=2.0),
        segment(top_p=0.5, logit_bias=((4, 50.0),), num_logprobs=3),
        segment(min_tokens=4, presence_penalty=1.0, output_ids=[1, 2]),
    ]
    sample_ids(make_sampler(), logits, segments)
    assert torch.equal(logits, before)


# ---- distributions


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_k": 39},
        {"top_p": 0.9},
        {"top_p": 0.35},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
        {"top_p": 0.9, "min_p": 0.2},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_softmax(params: dict[str, Any]) -> None:
    """Chi-square against the distribution got by sorting. Seeds are fixed, so the outcome is too."""
    num_draws = 4000
    logits = random_logits(1, seed=5)
    segments = [segment(seed=i, **params) for i in range(num_draws)]
    ids = sample_ids(make_sampler(), logits.expand(num_draws, -1), segments)
    counts = torch.bincount(torch.tensor(ids), minlength=VOCAB)
    expected = reference_distribution(logits[0], SamplingParams(max_tokens=1, **params))
    assert int(counts[expected == 0].sum()) == 0, "a token was drawn that the filters exclude"
    statistic, freedom = chi_square(counts, expected)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_one_requests_draws_over_its_steps_follow_the_softmax() -> None:
    """Independence along a sequence: the same request at 4,000 positions, as single rows."""
    logits, sampler, request = random_logits(1, vocab_size=8, seed=2, scale=1.0), make_sampler(8), segment(seed=1)
    for _ in range(4000):
        request.request.output_ids.append(sample_ids(sampler, logits, [request])[0])
    ids = torch.tensor(request.request.output_ids)
    statistic, freedom = chi_square(torch.bincount(ids, minlength=8), logits[0].double().softmax(-1))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    pairs = torch.bincount(ids[:-1] * 8 + ids[1:], minlength=64)
    probs = logits[0].double().softmax(-1)
    statistic, freedom = chi_square(pairs, torch.outer(probs, probs).flatten())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_unlikely_tokens_keep_their_share() -> None:
    """20,000 tokens of 1e-6 each hold 2 % of the mass together; coarse noise would lose them."""
    vocab_size = 20_001
    logits = torch.full((1, vocab_size), math.log(1e-6))
    logits[0, 0] = math.log(0.98)
    ids = sample_ids(make_sampler(vocab_size), logits.expand(1500, -1), [segment(seed=i) for i in range(1500)])
    assert 15 <= sum(token != 0 for token in ids) <= 48  # 30 expected, 3.3 standard deviations


# ---- filters at their edges


def test_top_p_keeps_the_token_that_crosses_the_limit() -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05: what may be drawn for limits on either side of each sum."""
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log()
    for top_p, allowed in [(1e-9, {1}), (0.49, {1}), (0.51, {1, 3}), (0.79, {1, 3}), (0.81, {1, 2, 3}), (0.99, None)]:
        segments = [segment(seed=i, top_p=top_p) for i in range(300)]
        drawn = set(sample_ids(make_sampler(4), logits.expand(300, -1), segments))
        assert drawn == (allowed or {0, 1, 2, 3}), top_p


def test_top_p_counts_the_mass_that_top_k_left_whatever_the_neighbours_top_k() -> None:
    """0.5, 0.3, 0.2: after top-k 2 the first holds 0.625, so top-p 0.62 ends with it; of all three it holds 0.5."""
    largest = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, -1)
    rows = [SamplingParams(max_tokens=1, top_k=k, top_p=p) for k, p in ((2, 0.62), (3, 0.62), (2, 0.63))]
    least = sampler_draw.thresholds(largest, rows).exp().tolist()
    assert least == pytest.approx([0.5, 0.3, 0.3])


def test_top_p_of_zero_is_greedy() -> None:
    logits = random_logits(5)
    assert sample_ids(make_sampler(), logits, [segment(top_p=0.0) for _ in range(5)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"top_p": 0.1}, {"top_k": 3}, {"top_k": 3, "top_p": 0.1}, {"min_p": 1.0}], ids=str)
def test_equal_logits_stay_together(params: dict[str, Any]) -> None:
    """Ties are kept or dropped as one, so no answer depends on how a sort orders them."""
    logits = torch.full((400, 6), -9.0)
    logits[:, [1, 2, 4, 5]] = 1.0
    drawn = set(sample_ids(make_sampler(6), logits, [segment(seed=i, **params) for i in range(400)]))
    assert drawn == {1, 2, 4, 5}


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.zeros(600, 6)
    assert set(sample_ids(make_sampler(6), logits, [segment(seed=i, top_k=6) for i in range(300)] * 2)) == set(range(6))


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1e6])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 10}, {"min_p": 0.1}], ids=str)
def test_extreme_temperatures_and_logits_stay_finite(temperature: float, filters: dict[str, Any]) -> None:
    logits = random_logits(20, scale=1e4)
    ids = sample_ids(make_sampler(), logits, [segment(seed=i, temperature=temperature, **filters) for i in range(20)])
    if temperature < 1:
        assert ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 10}, {"top_k": 30, "top_p": 0.99}], ids=str)
def test_tokens_the_model_forbids_are_never_drawn(filters: dict[str, Any]) -> None:
    logits = torch.full((200, VOCAB), -torch.inf)
    logits[:, 11:14] = 0.0
    assert set(sample_ids(make_sampler(), logits, [segment(seed=i, **filters) for i in range(200)])) == {11, 12, 13}


# ---- seeds


def test_a_seeded_request_draws_the_same_whatever_runs_beside_it() -> None:
    """Alone, in a large shuffled batch of every kind of row, and with another chunk size."""
    rng = random.Random(0)
    steps = [random_logits(1, vocab_size=500, seed=100 + i) for i in range(12)]

    def solo(seed: int, **params: Any) -> list[int]:
        sampler, mine = make_sampler(500), segment(seed=seed, **params)
        for logits in steps:
            mine.request.output_ids += sample_ids(sampler, logits, [mine])
        return mine.request.output_ids

    def crowded(seed: int, **params: Any) -> list[int]:
        sampler, mine = make_sampler(500), segment(seed=seed, **params)
        others = [segment(), segment(seed=5), segment(temperature=0.0), segment(top_k=7), segment(top_p=0.4, seed=8)]
        others.append(segment(top_k=200, top_p=0.9))
        for i, logits in enumerate(steps):
            batch = [*rng.sample(others, rng.randrange(1, 6)), mine]
            rng.shuffle(batch)
            rows = random_logits(len(batch), vocab_size=500, seed=i)
            rows[batch.index(mine)] = logits[0]
            for other, token in zip(batch, sample_ids(sampler, rows, batch), strict=True):
                other.request.output_ids.append(token)
        return mine.request.output_ids

    for params in ({}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05, "temperature": 1.4}):
        expected = solo(42, **params)
        assert crowded(42, **params) == expected
        assert solo(43, **params) != expected
        assert len(set(expected)) > 3


def test_chunking_a_batch_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30)
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.1}, {"top_p": 0.2}]
    segments = [segment(seed=i, **kinds[i % 5]) for i in range(30)]
    whole = sample_ids(make_sampler(), logits, segments)
    monkeypatch.setattr(sampler_draw, "_CPU_CHUNK_ELEMENTS", 7 * VOCAB)
    assert sample_ids(make_sampler(), logits, segments) == whole


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Preemption leaves output_ids and the sampler's state; even losing the state changes nothing for a seed."""
    logits = [random_logits(1, seed=i) for i in range(10)]
    params: dict[str, Any] = {"seed": 9, "presence_penalty": 0.7, "repetition_penalty": 1.3}

    def run(forget_at: int | None) -> list[int]:
        sampler, mine = make_sampler(), segment(**params)
        for i, row in enumerate(logits):
            if i == forget_at:
                sampler.release(mine.request.request_id)
            mine.request.output_ids += sample_ids(sampler, row, [mine])
        return mine.request.output_ids

    assert run(forget_at=6) == run(forget_at=None)


def test_requests_without_a_seed_differ() -> None:
    """Thirty-two draws from 40 equal tokens all alike would need odds of 40 to the power of 31."""
    ids = sample_ids(make_sampler(), torch.zeros(32, VOCAB), [segment() for _ in range(32)])
    assert len(set(ids)) > 1


def test_a_request_without_a_seed_keeps_its_own_randomness_beside_a_seeded_one() -> None:
    sampler = make_sampler()
    seeded, free = segment(seed=1), segment()
    pairs = []
    for _ in range(16):
        ids = sample_ids(sampler, torch.zeros(2, VOCAB), [seeded, free])
        seeded.request.output_ids.append(ids[0])
        free.request.output_ids.append(ids[1])
        pairs.append(ids)
    assert any(a != b for a, b in pairs)


# ---- penalties, bias, min_tokens


def _penalized(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """The definition, token by token."""
    result = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            r = params.repetition_penalty
            result[token] = result[token] / r if result[token] > 0 else result[token] * r
        count = output.count(token)
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return result


def test_penalties_equal_their_definition_over_a_growing_output() -> None:
    """Greedy through penalised logits, in one batch with unlike rows, for 80 steps (the buffers grow on the way)."""
    rng = random.Random(1)
    sampler = make_sampler(200)
    segments = [
        segment(prompt_ids=[rng.randrange(200) for _ in range(rng.randrange(1, 30))], temperature=0.0, **params)
        for params in (
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.4},
            {"repetition_penalty": 1.3},
            {"presence_penalty": -0.5, "frequency_penalty": 0.9, "repetition_penalty": 0.8},
            {},
        )
    ]
    for step in range(80):
        logits = random_logits(5, vocab_size=200, seed=step, scale=1.0) + random_logits(5, vocab_size=200, seed=77)
        ids = sample_ids(sampler, logits, segments)
        for row, (s, token) in enumerate(zip(segments, ids, strict=True)):
            request = s.request
            expected = _penalized(logits[row].tolist(), list(request.prompt_ids), request.output_ids, request.params)
            assert expected[token] == pytest.approx(max(expected), abs=1e-5)
            request.output_ids.append(token)


@pytest.mark.parametrize("params", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 4.0}])
@pytest.mark.parametrize("num_prompt", [1, 63, 64, 65])
def test_penalties_outlast_any_number_of_different_tokens(params: dict[str, Any], num_prompt: int) -> None:
    """Each step's likeliest token is the next unused id, so that output alone makes the buffers grow, twice."""
    sampler, num_outputs = make_sampler(300), 200
    mine = segment(prompt_ids=range(num_prompt), temperature=0.0, **params)
    logits = torch.full((1, 300), 1.0)
    logits[0, num_prompt : num_prompt + num_outputs] = torch.linspace(1.9, 1.1, num_outputs)
    for _ in range(num_outputs):
        mine.request.output_ids += sample_ids(sampler, logits, [mine])
        sampler.check_invariants()
    assert mine.request.output_ids == list(range(num_prompt, num_prompt + num_outputs))


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    mine = segment(prompt_ids=[5] * 20, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert sample_ids(make_sampler(), logits, [mine]) == [5]


def test_history_is_rebuilt_when_output_was_taken_back() -> None:
    logits, sampler = torch.zeros(1, VOCAB), make_sampler()
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    mine = segment(temperature=0.0, presence_penalty=1.0, output_ids=[5, 5])
    assert sample_ids(sampler, logits, [mine]) == [6]
    mine.request.output_ids.clear()
    assert sample_ids(sampler, logits, [mine]) == [5]


def test_logit_bias_moves_the_choice_and_only_the_choice() -> None:
    logits = random_logits(2)
    loser = int(logits[0].argmin())
    biased = segment(temperature=0.0, logit_bias=((loser, 100.0),), num_logprobs=0)
    tokens, _ = make_sampler().sample(logits, [biased, segment(temperature=0.0)])
    token = tokens[biased.request.request_id]
    assert token.token_id == loser
    assert token.logprob == pytest.approx(float(logits[0].log_softmax(-1)[loser]), abs=1e-5)


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.zeros(300, 3)
    drawn = sample_ids(make_sampler(3), logits, [segment(seed=i, logit_bias=((1, -100.0),)) for i in range(300)])
    assert set(drawn) == {0, 2}


def test_min_tokens_forbids_eos_and_stop_tokens_until_then() -> None:
    sampler, logits = make_sampler(), torch.zeros(1, VOCAB)
    logits[0, [3, 7, 9]] = torch.tensor([9.0, 8.0, 7.0])  # EOS, EOS, the request's stop token
    logits[0, 20] = 1.0
    mine = segment(temperature=0.0, min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    for expected in (20, 20, 3, 3):
        assert sample_ids(sampler, logits, [mine]) == [expected]
        mine.request.output_ids.append(expected)


# ---- logprobs


def test_logprobs_are_log_softmax_of_the_raw_logits() -> None:
    logits = random_logits(4)
    segments = [
        segment(temperature=0.0, num_logprobs=0),
        segment(temperature=0.3, top_k=3, seed=1, num_logprobs=5),
        segment(temperature=0.0, repetition_penalty=3.0, num_logprobs=2, output_ids=[int(logits[2].argmax())]),
        segment(temperature=0.0),
    ]
    tokens, failed = make_sampler().sample(logits, segments)
    assert failed == {}
    reference = logits.double().log_softmax(-1)
    for row, count in ((0, 0), (1, 5), (2, 2)):
        token = tokens[segments[row].request.request_id]
        assert token.logprob == pytest.approx(float(reference[row, token.token_id]), abs=1e-5)
        best = reference[row].topk(count)
        assert [i for i, _ in token.top_logprobs] == best.indices.tolist()
        assert [p for _, p in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    last = tokens[segments[3].request.request_id]
    assert last.logprob is None
    assert last.top_logprobs == ()


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    mine = segment(temperature=0.0, num_logprobs=20)
    logits = random_logits(1, vocab_size=6)
    tokens, _ = make_sampler(6).sample(logits, [mine])
    top = tokens[mine.request.request_id].top_logprobs
    assert [p for _, p in top] == pytest.approx(sorted(logits[0].log_softmax(-1).tolist(), reverse=True), abs=1e-5)


# ---- failures stay with their row


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1, "top_p": 0.9}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    clean = sample_ids(make_sampler(), logits, [segment(**params) for _ in range(3)])
    logits[1, 17] = bad
    segments = [segment(num_logprobs=2, **params) for _ in range(3)]
    tokens, failed = make_sampler().sample(logits, segments)
    names = [s.request.request_id for s in segments]
    assert set(failed) == {names[1]}
    assert "not finite" in failed[names[1]]
    assert [tokens[names[0]].token_id, tokens[names[2]].token_id] == [clean[0], clean[2]]


def test_a_row_without_any_possible_token_fails() -> None:
    mine = segment()
    _, failed = make_sampler().sample(torch.full((1, VOCAB), -torch.inf), [mine])
    assert set(failed) == {mine.request.request_id}


def test_masks_that_leave_nothing_fail_with_the_reason() -> None:
    mine, other = segment(min_tokens=1, stop_token_ids=tuple(range(VOCAB))), segment(temperature=0.0)
    tokens, failed = make_sampler().sample(torch.zeros(2, VOCAB), [mine, other])
    assert "min_tokens" in failed[mine.request.request_id]
    assert set(tokens) == {other.request.request_id}


def test_ids_outside_the_vocabulary_fail_with_the_range() -> None:
    mine = segment(logit_bias=((VOCAB, 1.0),))
    tokens, failed = make_sampler().sample(torch.zeros(1, VOCAB), [mine])
    assert tokens == {}
    assert "0 to 39" in failed[mine.request.request_id]


# ---- state


def test_release_frees_and_may_be_repeated() -> None:
    sampler = make_sampler()
    segments = [segment(), segment(presence_penalty=1.0), segment(temperature=0.0)]
    sample_ids(sampler, random_logits(3), segments)
    assert sampler.num_states == 2
    for s in [*segments, *segments]:
        sampler.release(s.request.request_id)
    assert sampler.num_states == 0


def test_the_likeliest_token_is_the_first_of_equals_and_a_nan_is_noticed() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(4))
    logits[1, 40] = logits[1, 200] = 9.0
    logits[2, 17], logits[3, 5], logits[4] = torch.nan, torch.inf, -torch.inf
    for rows in (logits, logits[1:4], logits[:, 10:150]):
        best, ids = likeliest(rows)
        expected = rows.max(dim=-1)
        assert torch.equal(ids, expected.indices)
        assert torch.equal(torch.nan_to_num(best, nan=-7.0), torch.nan_to_num(expected.values, nan=-7.0))
