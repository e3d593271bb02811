"""Drawing from a softmax by the Gumbel-max trick, restricted by top-k, top-p and min-p.

With x = logits / temperature and g_i independent Gumbel noise, argmax_i(x_i + g_i) is distributed as softmax(x)
(Gumbel 1954; Maddison et al. 2014), and the argmax over a subset as the softmax renormalised over it. Three things
follow:

- The noise of a row is a function of (the request's key, how many tokens it has put out) and the token id. A seeded
  request draws the same tokens whatever runs beside it and whether or not it was preempted. Logits that differ in their
  last digits between batches change a draw only when the two best scores are that close; inverting the cumulative
  distribution would let a change anywhere in the vocabulary move every later boundary.
- If the winner over the whole vocabulary lies inside the nucleus, it is the winner over the nucleus. Checking that
  takes one sum, so nine of ten top-p rows never need a sort.
- Filters are thresholds on x, so they don't depend on how a sort orders equal values: top-k keeps what is no less
  than the k-th largest value, top-p what has less than p of the mass strictly above it (ties stay together), min-p
  what has at least min_p times the likeliest token's probability. Top-p counts mass after top-k, as vLLM does.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from engine_worker.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: row `index` of the logits, the noise's key and position, and the filters."""

    index: int
    key: bytes
    position: int
    params: SamplingParams


def seeded_key(seed: int) -> bytes:
    """The noise key of a request with a seed: the same seed gives the same draws."""
    return b"seed:" + str(seed).encode()


def new_key() -> bytes:
    """The noise key of a request without a seed: never the same twice."""
    return secrets.token_bytes(16)


def draw_tokens(logits: Tensor, row_max: Tensor, draws: list[Draw]) -> list[int]:
    """Draw a token for each of `draws` from logits [S, V] with finite row maxima [S]; returns token ids in order."""
    index = torch.tensor([draw.index for draw in draws], device=logits.device)
    temperature = torch.tensor([draw.params.temperature for draw in draws], device=logits.device)
    x = (logits[index] - row_max[index, None]) / temperature[:, None]  # [D, V], the likeliest token at 0
    scores = gumbel_noise(draws, logits.shape[1], logits.device).add_(x)  # [D, V]
    _apply_min_p(scores, x, draws)
    _apply_top_k_top_p(scores, x, draws)
    return scores.max(dim=-1).indices.tolist()


def gumbel_noise(draws: list[Draw], vocab_size: int, device: torch.device) -> Tensor:
    """[D, V] float32 standard Gumbel noise, each row from its own key and position.

    Uniforms are made in float64: float32's 24 bits would cut off the noise that lets unlikely tokens win.
    """
    noise = torch.empty(len(draws), vocab_size, device=device)
    uniform = torch.empty(vocab_size, dtype=torch.float64, device=device)
    generator = torch.Generator(device)
    for row, draw in enumerate(draws):
        generator.manual_seed(_noise_seed(draw.key, draw.position))
        noise[row] = uniform.uniform_(generator=generator).log_().neg_()  # a standard exponential
    return noise.log_().neg_()  # u = 0 gives exponential inf, noise -inf: it never wins


def _noise_seed(key: bytes, position: int) -> int:
    digest = blake2b(position.to_bytes(8, "little"), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: generators take signed seeds


def _apply_min_p(scores: Tensor, x: Tensor, draws: list[Draw]) -> None:
    """Drop what is less likely than min_p times the likeliest: x < log(min_p), as the likeliest is at 0."""
    if not any(draw.params.min_p > 0 for draw in draws):
        return
    floors = [math.log(draw.params.min_p) if draw.params.min_p > 0 else -math.inf for draw in draws]
    scores.masked_fill_(x < torch.tensor(floors, device=x.device)[:, None], -torch.inf)


def _apply_top_k_top_p(scores: Tensor, x: Tensor, draws: list[Draw]) -> None:
    """Drop what top-k and top-p exclude, in place."""
    vocab_size = x.shape[1]
    with_k = [row for row, draw in enumerate(draws) if 0 < draw.params.top_k < vocab_size]
    only_p = [row for row, draw in enumerate(draws) if draw.params.top_p < 1 and row not in set(with_k)]
    if only_p:
        only_p = _outside_nucleus(scores, x, draws, only_p)
    if with_k:
        largest = x[with_k].topk(max(draws[row].params.top_k for row in with_k), dim=-1).values
        _drop_below(scores, x, with_k, thresholds(largest, [draws[row].params for row in with_k]))
    if only_p:
        largest = x[only_p].sort(dim=-1, descending=True).values
        _drop_below(scores, x, only_p, thresholds(largest, [draws[row].params for row in only_p]))


def _outside_nucleus(scores: Tensor, x: Tensor, draws: list[Draw], rows: list[int]) -> list[int]:
    """Those of `rows` whose winner over the whole vocabulary lies outside their nucleus, so that they need a sort."""
    sub = x[rows]  # [N, V]
    winner = sub.gather(1, scores[rows].max(dim=-1).indices[:, None])  # [N, 1]
    mass = sub.exp()
    total = mass.sum(dim=-1)
    above = mass.masked_fill_(sub <= winner, 0).sum(dim=-1)
    top_p = torch.tensor([draws[row].params.top_p for row in rows], device=x.device)
    inside = ((above < top_p * total) | (above == 0)).tolist()
    return [row for row, is_inside in zip(rows, inside, strict=True) if not is_inside]


def thresholds(largest: Tensor, params: list[SamplingParams]) -> Tensor:
    """[N] the least value that top-k and top-p keep, from each row's largest values [N, K] in descending order."""
    width = largest.shape[1]
    k = torch.tensor([p.top_k if 0 < p.top_k < width else width for p in params], device=largest.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=largest.device)[:, None]
    rank = torch.arange(width, device=largest.device)
    mass = largest.double().exp().masked_fill_(rank >= k, 0)  # [N, K]
    cumulative = mass.cumsum(dim=-1)
    kept = (cumulative - mass < top_p * cumulative[:, -1:]) & (rank < k)  # mass strictly before, in sorted order
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # top_p = 0 still keeps the likeliest
    return largest.gather(1, last).squeeze(1)


def _drop_below(scores: Tensor, x: Tensor, rows: list[int], threshold: Tensor) -> None:
    """scores[rows] = -inf where x < threshold [N]."""
    scores[rows] = scores[rows].masked_fill_(x[rows] < threshold[:, None], -torch.inf)
