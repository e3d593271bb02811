"""Tokens that came with the logits are taken for those who want the likeliest and nothing else, for nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine_worker.model.sampler import UNSOUND, Sampler
from engine_worker.model.sampler_draw import likeliest
from tests.engine_worker.model.sampling import segment

pytestmark = pytest.mark.engine

VOCAB = 40
GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 3.0, "top_k": 1}, {"temperature": 0.0, "seed": 3}]
OTHERS: list[dict[str, Any]] = [
    {"seed": 3},
    {"seed": 3, "temperature": 0.4, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.0, "logit_bias": ((5, 100.0),)},
    {"temperature": 0.0, "repetition_penalty": 1e9},
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 0.0, "allowed_token_ids": (7,)},
    {"temperature": 0.0, "bad_words": tuple((i,) for i in range(20))},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(20))},
    {"temperature": 0.0, "num_logprobs": 2},
    {"temperature": 0.0, "num_logprobs": 0},
]


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def found_in(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    best, ids = likeliest(logits)
    return best.numpy(), ids.numpy()


def misleading(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Not what the logits say, so that one sees who is given it."""
    return np.zeros(rows, np.float32), np.full(rows, VOCAB - 1)


@pytest.mark.parametrize("params", GREEDY, ids=str)
def test_who_wants_the_likeliest_gets_what_was_found(params: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB, (), "cpu")
    segments = [segment(**params) for _ in range(3)]
    for _ in range(2):
        tokens, failed = sampler.sample(logits_of(3), segments, misleading(3))
        assert failed == {}
        assert [tokens[s.request.request_id].token_id for s in segments] == [VOCAB - 1] * 3
    assert sampler.num_states == 3
    for each in segments:
        sampler.release(each.request.request_id)
    assert sampler.num_states == 0


@pytest.mark.parametrize("params", [*GREEDY, *OTHERS], ids=str)
@pytest.mark.parametrize("beside", [[], [{"temperature": 0.0}], [{"seed": 8}, {"temperature": 0.0}]], ids=str)
def test_everyone_gets_what_they_get_without(params: dict[str, Any], beside: list[dict[str, Any]]) -> None:
    plain, helped = Sampler(VOCAB, (), "cpu"), Sampler(VOCAB, (), "cpu")
    crowd = [params, *beside]
    segments = [segment(output_ids=(4, 9), **each) for each in crowd]
    for step in range(6):
        logits = logits_of(len(crowd), seed=step)
        expected = plain.sample(logits, segments)
        assert helped.sample(logits, segments, found_in(logits)) == expected
        assert helped.following == plain.following
        assert helped.completed == plain.completed
        assert expected[1] == {}
        for each in segments:
            each.request.output_ids.append(expected[0][each.request.request_id].token_id)


@pytest.mark.parametrize("params", OTHERS, ids=str)
def test_another_request_of_the_same_name_is_not_taken_for_the_one_before(params: dict[str, Any]) -> None:
    """Even where nobody said that the first one is over."""
    logits = logits_of(1)
    sampler = Sampler(VOCAB, (), "cpu")
    sampler.sample(logits, [segment(name="a", temperature=0.0)], found_in(logits))
    after = sampler.sample(logits, [segment(name="a", **params)], found_in(logits))
    assert after == Sampler(VOCAB, (), "cpu").sample(logits, [segment(name="a", **params)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_sound_fails_alone(value: float) -> None:
    logits = logits_of(3)
    logits[1, 7] = value
    segments = [segment(temperature=0.0) for _ in range(3)]
    tokens, failed = Sampler(VOCAB, (), "cpu").sample(logits, segments, found_in(logits))
    names = [each.request.request_id for each in segments]
    assert failed == {names[1]: UNSOUND}
    assert [tokens[name].token_id for name in (names[0], names[2])] == logits[[0, 2]].argmax(-1).tolist()
