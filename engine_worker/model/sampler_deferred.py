"""Sampling whose result is read later: ids stay on the device, where the next step finds its input.

For requests that run ahead only (core/ahead.py): greedy ones and draws, whose every input is known beforehand. Tokens
are those that Sampler.sample would choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_worker.core.types import SampledToken, Segment
from engine_worker.model.sampler import UNSOUND, Sampler
from engine_worker.model.sampler_draw import Draw, draw_ids, likeliest
from engine_worker.model.transfer import ToHost, to_device


class DeferredSampling:
    """One token for each segment. `ids` [R] are on the device, in the segments' order."""

    def __init__(self, sampler: Sampler, logits: Tensor, segments: Sequence[Segment]) -> None:
        """logits: [R, V] float32, row i for segments[i]. Queues everything and waits for nothing, on CUDA."""
        self.rows = {segment.request.request_id: row for row, segment in enumerate(segments)}
        self._segments = segments
        best, self.ids = likeliest(logits)  # [R], [R]
        draws = []
        for row, segment in enumerate(segments):
            request = segment.request
            key = sampler.noise_key(request)
            if key is not None:  # tokens put out before this one: the request itself may not know them all yet
                position = segment.end - len(request.prompt_ids)
                draws.append(Draw(index=row, key=key, position=position, params=request.params))
        if draws:
            drawn = draw_ids(logits, best, draws)
            self.ids[to_device([draw.index for draw in draws], logits.device)] = drawn
        wanted = [row for row, segment in enumerate(segments) if segment.request.params.num_logprobs is not None]
        self._wanted = {row: place for place, row in enumerate(wanted)}
        results = [self.ids, torch.isfinite(best)]
        if wanted:
            results += self._logprobs(logits, wanted)
        self._on_host = ToHost(results)

    def result(self) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Waits. Tokens by request id, and a sentence for each request whose logits were not sound."""
        ids, sound, *logprobs = [tensor.tolist() for tensor in self._on_host.get()]
        sampled: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        for row, segment in enumerate(self._segments):
            request = segment.request
            if not sound[row]:
                failed[request.request_id] = UNSOUND
            elif row in self._wanted:
                own, values, tokens = (column[self._wanted[row]] for column in logprobs)
                count = request.params.num_logprobs or 0
                top = tuple(zip(tokens[:count], values[:count], strict=True))
                sampled[request.request_id] = SampledToken(ids[row], own, top)
            else:
                sampled[request.request_id] = SampledToken(ids[row])
        return sampled, failed

    def _logprobs(self, logits: Tensor, wanted: list[int]) -> list[Tensor]:
        """[N] of the chosen tokens, and [N, k] values and ids of the likeliest."""
        index = to_device(wanted, logits.device)
        raw = logits if len(wanted) == len(logits) else logits[index]
        norm = raw.logsumexp(dim=-1, keepdim=True)
        own = raw.gather(1, self.ids[index, None]) - norm
        counts = [self._segments[row].request.params.num_logprobs or 0 for row in wanted]
        top, top_ids = raw.topk(min(max(counts), raw.shape[1]), dim=-1)
        return [own[:, 0], top - norm, top_ids]
