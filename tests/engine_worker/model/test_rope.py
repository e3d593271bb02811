"""Rotary embeddings that follow the longest request of a batch are frozen, so that neighbours don't matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine_worker.model.rope import freeze_rope
from tests.engine_worker.model.tiny_models import tiny_model

pytestmark = pytest.mark.engine

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def longrope() -> PreTrainedModel:
    return tiny_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)


def dynamic() -> PreTrainedModel:
    return tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=64)


def angles(module: PreTrainedModel, positions: list[int]) -> torch.Tensor:
    """cos of the rotary embedding at each position, asked for together."""
    cos, _ = module.model.rotary_emb(torch.zeros(1, 1, 48), position_ids=torch.tensor([positions]))
    return cos[0].clone()


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_unfrozen_they_depend_on_the_neighbours(make: Any) -> None:
    """The fault that freezing mends: it is there."""
    module = make()
    alone = angles(module, [10])[0]
    assert not torch.equal(angles(module, [10, 400])[0], alone)


@pytest.mark.parametrize("make", [longrope, dynamic])
@pytest.mark.parametrize("max_model_len", [32, 512])
def test_frozen_they_do_not(make: Any, max_model_len: int) -> None:
    module = make()
    freeze_rope(module, max_model_len)
    alone = angles(module, [10])[0]
    assert torch.equal(angles(module, [10, 400])[0], alone)
    assert torch.equal(angles(module, [10])[0], alone)


def test_longrope_takes_the_factors_of_the_served_length() -> None:
    plain = longrope()
    short, long = angles(plain, [10])[0], angles(plain, [10, 400])[0]

    module = longrope()
    assert freeze_rope(module, 64) == (64, ["longrope is frozen at its short factors"])
    assert torch.equal(angles(module, [10])[0], short)

    module = longrope()
    assert freeze_rope(module, 65) == (65, ["longrope is frozen at its long factors"])
    assert torch.equal(angles(module, [10])[0], long)


def test_dynamic_is_unscaled_and_capped() -> None:
    short = angles(dynamic(), [10])[0]
    module = dynamic()
    max_model_len, notes = freeze_rope(module, 256)
    assert max_model_len == 64
    assert "at most 64" in notes[0]
    assert torch.equal(angles(module, [10, 63])[0], short)
    assert freeze_rope(dynamic(), 32)[0] == 32


def test_fixed_kinds_are_left_alone() -> None:
    for family in ("llama", "gemma3_text", "gpt_oss"):
        module = tiny_model(family)
        assert freeze_rope(module, 512) == (512, [])
