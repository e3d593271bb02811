"""Four bits a weight: a scale and a minimum for neighbours of a row, weight = scale * q + minimum with q in 0 .. 15.

The pair is searched for, group by group, by the squared error of what is stored, after scale and minimum were rounded
to half floats. Where a range of numbers is cut short, the few beyond it are clamped and all others rounded on a finer
grid, which pays for most groups. So candidates are ranges of several widths within that from the least number to the
largest, this one itself, and symmetric grids (minimum = -8 * scale, the number of largest size at an end; the scale may
be negative). From each onwards the pair that fits the integers best, by least squares, and the integers nearest to
that pair are sought in turn. The error is therefore never larger than that of rounding from least to largest, nor than
that of the symmetric grids; and numbers that came from a GGUF file in Q4_0 or Q4_1 with the same groups (whose scales
are half floats, too) come back exactly.

Where it is known how large the inputs are that meet each column (importance.py), a column's squared error counts as
much as their mean square, in the fits as in the choice. Weighing errors so is what llama.cpp's importance matrix does;
GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022) has the
whole matrix of second moments in place of its diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_worker.model.errors import ModelError

_LARGEST = 65504.0  # of a half float
_CHUNK = 1 << 17  # numbers at a time: a search's tensors stay within a core's cache
_CHUNK_CUDA = 1 << 23  # there what counts is how many kernels are launched
# of ranges: width as a share of the whole, and how much of the rest is cut off below
_RANGES = ((1.0, 0.0), (0.85, 0.0), (0.85, 0.5), (0.85, 1.0))
_SYMMETRIC = (1.0, 0.9)  # of the scale at which the number of largest size lies at an end
_FITS = 2  # rounds of least squares


def round_groups(groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [N, G, size] in float32 -> integers uint8 [N, G, size], scales and minima float16 [N, G].

    `importance` [G, size], above 0, is what a squared error counts for; only ratios within a group matter. None: all 1.

    Raises ModelError for numbers that a half float can't hold.
    """
    values = torch.empty_like(groups, dtype=torch.uint8)
    scales, minima = (groups.new_empty(groups.shape[:2], dtype=torch.float16) for _ in range(2))
    chunk = _CHUNK_CUDA if groups.device.type == "cuda" else _CHUNK
    if importance is None:
        importance = groups.new_ones(groups.shape[1:])
    share = (importance / importance.sum(1, keepdim=True))[None]
    step = max(1, chunk // max(1, groups[:1].numel()))
    for first in range(0, groups.shape[0], step):
        rows = slice(first, first + step)
        search = _Search(groups[rows], share)
        values[rows] = search.integers(search.scale, search.minimum).to(torch.uint8)
        scales[rows] = search.scale[:, :, 0].half()
        minima[rows] = search.minimum[:, :, 0].half()
    return values, scales, minima


class _Search:
    """The best pair so far of each group: `scale` and `minimum` [N, G, 1], and its mean squared error, weighed.

    `share` [1, G, size] has the sum 1 in each group.
    """

    def __init__(self, groups: Tensor, share: Tensor) -> None:
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        if not bool((low.abs().maximum(high.abs()) <= _LARGEST).all()):
            raise ModelError("The model has weights beyond the range of half floats, or not finite. Leave out int4.")
        self.groups = groups
        self._share = share
        self._mean = self._average(groups)
        width = high - low
        self.scale, self.minimum = _halved(width / 15, low)
        self.error = self._error(self.scale, self.minimum)
        for share, below in _RANGES:
            self._fit(width * (share / 15), low + width * ((1 - share) * below))
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        for factor in _SYMMETRIC:
            scale = largest * (factor / -8)
            self._keep(scale, -8 * scale)
            self._fit(scale, -8 * scale)

    def integers(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """The numbers 0 .. 15 that come nearest, in float32. A scale of 0 is that of a group of equals."""
        return ((self.groups - minimum) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, 15)

    def _fit(self, scale: Tensor, minimum: Tensor) -> None:
        for _ in range(_FITS):
            q = self.integers(scale, minimum)
            mean = self._average(q)
            weighed = (q - mean).mul_(self._share)
            spread = (weighed * q).sum(2, keepdim=True)
            scale = weighed.mul_(self.groups).sum(2, keepdim=True) / spread.clamp(min=1e-9)
            minimum = self._mean - scale * mean
        self._keep(scale, minimum)

    def _keep(self, scale: Tensor, minimum: Tensor) -> None:
        scale, minimum = _halved(scale, minimum)
        error = self._error(scale, minimum)
        better = error < self.error  # never so for what overflowed
        self.scale = torch.where(better, scale, self.scale)
        self.minimum = torch.where(better, minimum, self.minimum)
        self.error = torch.where(better, error, self.error)

    def _error(self, scale: Tensor, minimum: Tensor) -> Tensor:
        return self._average(self.integers(scale, minimum).mul_(scale).add_(minimum).sub_(self.groups).square_())

    def _average(self, numbers: Tensor) -> Tensor:
        return (numbers * self._share).sum(2, keepdim=True)


def _halved(*tensors: Tensor) -> list[Tensor]:
    return [tensor.half().float() for tensor in tensors]
