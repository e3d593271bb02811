"""Noise made by a kernel for a whole batch, interpreted here."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine_worker.model.interpreted import triton_backend

pytestmark = pytest.mark.engine


def test_noise_is_standard_gumbel_and_belongs_to_its_seed() -> None:
    triton_backend()
    from engine_worker.model.triton_noise import gumbel

    seeds = torch.tensor([1, 2, 1, 2**63 - 1])
    noise = gumbel(seeds, 20_000)
    assert noise.dtype == torch.float32
    assert torch.equal(noise[0], noise[2])
    assert bool(torch.isfinite(noise).all())
    for row in (0, 1, 3):
        values = noise[row].double().sort().values
        exact = torch.exp(-torch.exp(-values))  # the distribution function at the sorted sample
        steps = torch.arange(1, len(values) + 1) / len(values)
        assert float((exact - steps).abs().max()) < 1.95 / math.sqrt(len(values))  # Kolmogorov and Smirnov, 0.1 %
    assert float(torch.corrcoef(noise[[0, 1, 3]]).triu(1).abs().max()) < 0.03
    assert torch.equal(gumbel(seeds[1:2], 20_000)[0], noise[1])  # whatever is beside it
