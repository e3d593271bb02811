"""The service model: how long one engine step takes on which GPU.

    t_step = t0 + max(W, n lin) + att sum c (ctx + c / 2) + kv sum ctx_decode

n new tokens in the step; W reads the weights once, `lin` computes one token's linear layers, so a step of few tokens
costs W and a large one n lin. Every prefill chunk of c tokens behind ctx computed ones attends c (ctx + c / 2) pairs;
every decode reads its whole context at `kv` seconds a token.

The constants are those of Llama-3-8B in bf16 (32 layers, width 4096, 131,072 KV bytes a token). A pair costs 4 L H
operations in attention, which is taken to run at a third of the GPU's dense bf16 peak (linear layers: at over half).

Decode steps that follow each other with the same sequences have every context one longer than the step before, so k of
them take a sum in closed form (`decode_run_s`), and the moment at which the j-th ends is found without walking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LAYERS, WIDTH = 32, 4096
ATTENTION_SHARE = 1 / 3  # of the peak
STEP_S = 1.5e-3
TOKEN_BUDGET = 8192


class UnknownGpu(ValueError):
    """No GPU of that name; the message lists those there are."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Seconds: `step_s` t0, `weights_s` W, `linear_s` lin a token, `attention_s` att a pair, `kv_s` kv a token.

    `num_blocks` of 512 tokens fit beside the weights.
    """

    name: str
    weights_s: float
    linear_s: float
    kv_s: float
    num_blocks: int
    attention_s: float
    step_s: float = STEP_S

    def step_seconds(self, chunks: Sequence[tuple[int, int]], num_decodes: int, decode_context: int) -> float:
        """One step. `chunks`: (tokens, context before them) of each prefill; `decode_context`: summed over decodes."""
        num_tokens, pairs = num_decodes, 0.0
        for size, context in chunks:
            num_tokens += size
            pairs += size * (context + size / 2)
        work = max(self.weights_s, num_tokens * self.linear_s)
        return self.step_s + work + self.attention_s * pairs + self.kv_s * decode_context

    def decode_run_s(self, num_steps: int, num_decodes: int, context: int) -> float:
        """`num_steps` decode steps in a row of the same sequences, whose contexts sum to `context` in the first."""
        first = self.step_seconds((), num_decodes, context)
        return num_steps * first + self.kv_s * num_decodes * (num_steps * (num_steps - 1) / 2)

    def decode_steps_until(self, seconds: float, num_decodes: int, context: int) -> int:
        """The least number (at least 1) of such steps that take `seconds` or longer."""
        first = self.step_seconds((), num_decodes, context)
        slope = self.kv_s * num_decodes
        if slope > 0.0:
            lead = first - slope / 2
            steps = (math.sqrt(lead * lead + 2 * slope * max(seconds, 0.0)) - lead) / slope
        else:
            steps = seconds / first
        num_steps = max(int(steps) - 1, 1)
        while self.decode_run_s(num_steps, num_decodes, context) < seconds:
            num_steps += 1
        while num_steps > 1 and self.decode_run_s(num_steps - 1, num_decodes, context) >= seconds:
            num_steps -= 1
        return num_steps

    def cold_prefill_s(self, num_tokens: int, budget: int = TOKEN_BUDGET) -> float:
        """A prompt computed alone, nothing cached, in chunks of the step's token budget."""
        full, rest = divmod(num_tokens, budget)
        seconds = full * (self.step_s + max(self.weights_s, budget * self.linear_s))
        if rest:
            seconds += self.step_s + max(self.weights_s, rest * self.linear_s)
        return seconds + self.attention_s * num_tokens * num_tokens / 2


def _gpu(name: str, weights_ms: float, linear_us: float, kv_ns: float, num_blocks: int, peak: float) -> Gpu:
    """`peak`: operations a second."""
    attention_s = 4 * LAYERS * WIDTH / (ATTENTION_SHARE * peak)
    return Gpu(name, weights_ms * 1e-3, linear_us * 1e-6, kv_ns * 1e-9, num_blocks, attention_s)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("l4", 67.0, 295.0, 546.0, 37, 121e12),
        _gpu("a100", 9.8, 86.0, 80.0, 788, 312e12),
        _gpu("h100", 6.0, 29.5, 49.0, 788, 989e12),
        _gpu("h200", 4.2, 29.5, 34.0, 1606, 989e12),
    )
}


def gpu_named(name: str) -> Gpu:
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UnknownGpu(f"unknown GPU {name!r}: choose one of {', '.join(GPUS)}")
    return gpu


def parse_fleet(text: str, num_replicas: int) -> list[Gpu]:
    """`h100` for all replicas, or parts such as `h100:4,l4:2` that make up the fleet. Raises UnknownGpu, ValueError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and ":" not in parts[0]:
        return [gpu_named(parts[0])] * num_replicas
    fleet: list[Gpu] = []
    for part in parts:
        name, _, count = part.partition(":")
        if not count.isdigit() or not int(count):
            raise ValueError(f"--gpu {text!r}: write NAME, or NAME:COUNT,NAME:COUNT for a mixed fleet")
        fleet += [gpu_named(name)] * int(count)
    return fleet
