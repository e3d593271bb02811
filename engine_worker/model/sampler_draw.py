"""Drawing from a softmax by the Gumbel-max trick, restricted by top-k, top-p and min-p.

With x = logits / temperature and g_i independent Gumbel noise, argmax_i(x_i + g_i) is distributed as softmax(x)
(Gumbel 1954; Maddison et al. 2014), and the argmax over a subset as the softmax renormalised over it. Three things
follow:

- The noise of a row is a function of (the request's key, how many tokens it has put out) and the token id. A seeded
  request draws the same tokens whatever runs beside it and whether or not it was preempted. Logits that differ in their
  last digits between batches change a draw only when the two best scores are that close; inverting the cumulative
  distribution would let a change anywhere in the vocabulary move every later boundary.
- If the winner over the whole vocabulary lies inside top-p's nucleus, it is the winner over the nucleus. Checking that
  takes one sum, and a winner that lies outside shows where else not to look, so nothing is ever sorted.
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
from engine_worker.model.transfer import to_device

_CPU_CHUNK_ELEMENTS = 1 << 17  # rows are drawn in chunks whose temporaries stay in a core's cache
_CUDA_CHUNK_ELEMENTS = 1 << 23  # there they bound the memory: top-p sorts, in float64


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: row `index` of the logits, the noise's key and position, and the filters."""

    index: int
    key: bytes
    position: int
    params: SamplingParams


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value [R] and where it is first [R], as max(dim=-1) has it: NaN, at its place, where one is.

    On a CPU by numpy, in a tenth of the time: torch looks for a value and its place without the vector units.
    """
    if logits.device.type != "cpu":
        best, ids = logits.max(dim=-1)
        return best, ids
    ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, ids[:, None])[:, 0], ids


def seeded_key(seed: int) -> bytes:
    """The noise key of a request with a seed: the same seed gives the same draws."""
    return b"seed:" + str(seed).encode()


def new_key() -> bytes:
    """The noise key of a request without a seed: never the same twice."""
    return secrets.token_bytes(16)


def draw_tokens(logits: Tensor, row_max: Tensor, draws: list[Draw]) -> list[int]:
    """Draw a token for each of `draws` from logits [S, V] with finite row maxima [S]; returns token ids in order."""
    return draw_ids(logits, row_max, draws).tolist()


def draw_ids(logits: Tensor, row_max: Tensor, draws: list[Draw]) -> Tensor:
    """The same as a tensor on the logits' device, without waiting for it on CUDA."""
    elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _CUDA_CHUNK_ELEMENTS
    chunk = max(1, elements // logits.shape[1])
    parts = [_draw_chunk(logits, row_max, draws[start : start + chunk]) for start in range(0, len(draws), chunk)]
    return torch.cat(parts)


def _draw_chunk(logits: Tensor, row_max: Tensor, draws: list[Draw]) -> Tensor:
    index = to_device([draw.index for draw in draws], logits.device)
    temperature = _put([draw.params.temperature for draw in draws], logits.device)
    x = (logits[index] - row_max[index, None]).div_(temperature[:, None])  # [D, V], the likeliest token at 0
    scores = gumbel_noise(draws, logits.shape[1], logits.device).add_(x)  # [D, V]
    _apply_min_p(scores, x, draws)
    _apply_top_k_top_p(scores, x, draws)
    return likeliest(scores)[1]


def gumbel_noise(draws: list[Draw], vocab_size: int, device: torch.device) -> Tensor:
    """[D, V] float32 standard Gumbel noise, each row from its own key and position.

    Uniforms are made in float64: float32's 24 bits would cut off the noise that lets unlikely tokens win. On CUDA all
    rows are made by one kernel (other numbers than a CPU's for the same seed): a generator each would cost launches.
    """
    if device.type == "cuda":
        return cuda_noise([_noise_seed(draw.key, draw.position) for draw in draws], vocab_size, device)
    noise = torch.empty(len(draws), vocab_size, device=device)
    uniform = torch.empty(vocab_size, dtype=torch.float64, device=device)
    generator = torch.Generator(device)
    for row, draw in enumerate(draws):
        generator.manual_seed(_noise_seed(draw.key, draw.position))
        # Never 0: its noise would be -inf, and a row must always have a finite score.
        noise[row] = uniform.uniform_(2**-54, 1, generator=generator).log_().neg_()  # standard exponentials
    return noise.log_().neg_()


def _noise_seed(key: bytes, position: int) -> int:
    digest = blake2b(position.to_bytes(8, "little"), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits: generators take signed seeds


def _apply_min_p(scores: Tensor, x: Tensor, draws: list[Draw]) -> None:
    """Drop what is less likely than min_p times the likeliest: x < log(min_p), as the likeliest is at 0."""
    if not any(draw.params.min_p > 0 for draw in draws):
        return
    floors = [math.log(draw.params.min_p) if draw.params.min_p > 0 else -math.inf for draw in draws]
    scores.masked_fill_(x < _put(floors, x.device)[:, None], -torch.inf)


def _apply_top_k_top_p(scores: Tensor, x: Tensor, draws: list[Draw]) -> None:
    """Drop what top-k and top-p exclude, in place, as far as it could win."""
    vocab_size = x.shape[1]
    with_k = [row for row, draw in enumerate(draws) if 0 < draw.params.top_k < vocab_size]
    only_p = [row for row, draw in enumerate(draws) if draw.params.top_p < 1 and row not in with_k]
    if with_k:
        largest = _take(x, with_k).topk(max(draws[row].params.top_k for row in with_k), dim=-1).values
        _drop_below(scores, x, with_k, thresholds(largest, [draws[row].params for row in with_k]))
    if only_p and x.device.type == "cuda":  # the loop below would wait for the device in every round
        ordered = _take(x, only_p).sort(dim=-1, descending=True).values
        _drop_below(scores, x, only_p, thresholds(ordered, [draws[row].params for row in only_p]))
    elif only_p:
        _drop_winners_outside_nucleus(scores, x, draws, only_p)


def _drop_winners_outside_nucleus(scores: Tensor, x: Tensor, draws: list[Draw], rows: list[int]) -> None:
    """Strike out winners, and all that is no likelier, until every row's winner lies in its nucleus.

    A token lies in the nucleus iff the tokens strictly likelier than it hold less than top_p. So one that lies outside
    proves that everything no likelier does too. The likeliest token always lies inside, hence this ends; on average
    after about 1 + ln(1 / top_p) rounds.
    """
    mass = _take(x, rows).exp()  # [N, V]
    top_p = _put([draws[row].params.top_p for row in rows], x.device)
    limit = top_p * mass.sum(dim=-1)
    sub_x, sub_scores = _take(x, rows), _take(scores, rows)
    while rows:
        winner = sub_x.gather(1, likeliest(sub_scores)[1][:, None])  # [N, 1]
        above = mass.masked_fill(sub_x <= winner, 0).sum(dim=-1)
        pending = torch.nonzero((above >= limit) & (above > 0)).flatten().tolist()
        if not pending:
            return
        rows = [rows[i] for i in pending]
        mass, sub_x, winner, limit = (_take(t, pending) for t in (mass, sub_x, winner, limit))
        sub_scores = _take(sub_scores, pending).masked_fill_(sub_x <= winner, -torch.inf)
        if sub_scores is not scores:
            scores[rows] = sub_scores


def thresholds(largest: Tensor, params: list[SamplingParams]) -> Tensor:
    """[N] the least value that top-k and top-p keep, from each row's K >= top_k largest values [N, K], descending."""
    width = largest.shape[1]
    k = to_device([p.top_k if 0 < p.top_k < width else width for p in params], largest.device)[:, None]
    top_p = _put([p.top_p for p in params], largest.device, torch.float64)[:, None]
    rank = torch.arange(width, device=largest.device)
    mass = largest.double().exp().masked_fill_(rank >= k, 0)  # [N, K]
    cumulative = mass.cumsum(dim=-1)
    kept = (cumulative - mass < top_p * cumulative[:, -1:]) & (rank < k)  # mass strictly before, in sorted order
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # top_p = 0 still keeps the likeliest
    return largest.gather(1, last).squeeze(1)


def _drop_below(scores: Tensor, x: Tensor, rows: list[int], threshold: Tensor) -> None:
    """scores[rows] = -inf where x < threshold [N], in place."""
    kept = _take(scores, rows)
    kept.masked_fill_(_take(x, rows) < threshold[:, None], -torch.inf)
    if kept is not scores:
        scores[to_device(rows, scores.device)] = kept


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """tensor[rows] for ascending rows; the tensor itself, not a copy, if that is all of them."""
    return tensor if len(rows) == tensor.shape[0] else tensor[to_device(rows, tensor.device)]


def _put(values: list[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)


def cuda_noise(seeds: list[int], vocab_size: int, device: torch.device) -> Tensor:
    from engine_worker.model.triton_noise import gumbel

    return gumbel(to_device(seeds, device), vocab_size)
