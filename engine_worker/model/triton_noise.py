"""Gumbel noise for a whole batch of draws in one launch, each row from its own seed (see sampler_draw)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def gumbel_kernel(noise, seeds, vocab_size, BLOCK: tl.constexpr):  # noise [D, V] float32, seeds [D] int64
    """Program (row, block of the vocabulary). Philox (Salmon et al. 2011), counted by token id, keyed by the seed."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    high, low, _, _ = tl.randint4x(tl.load(seeds + row), token)
    # 53 bits of uniform in (0, 1): neither end, whose noise would be infinite.
    high = (high.to(tl.uint32, bitcast=True) >> 5).to(tl.float64)
    low = (low.to(tl.uint32, bitcast=True) >> 6).to(tl.float64)
    uniform = (high * 67108864.0 + low + 0.5) * 1.1102230246251565e-16
    tl.store(noise + row * vocab_size + token, (-tl.log(-tl.log(uniform))).to(tl.float32), mask=token < vocab_size)


def gumbel(seeds: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [D, V] float32 from seeds [D] int64."""
    noise = torch.empty(len(seeds), vocab_size, device=seeds.device)
    gumbel_kernel[(len(seeds), triton.cdiv(vocab_size, _BLOCK))](noise, seeds, vocab_size, BLOCK=_BLOCK)
    return noise
