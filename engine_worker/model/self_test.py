"""At every load, prove that this very model runs rightly when packed, chunked and paged.

Random sequences go through the model twice: each alone through transformers' own eager attention, and all together the
way we serve, in four steps of mixed chunks, through shuffled cache blocks, with the logits asked for in reverse. The
logits must agree at every position. Wrong masks, positions, scales or block tables change logits by at least several
percent of their spread; right ones by rounding.

Windows and attention chunks are shrunk to a few tokens meanwhile, on every module and config: with a window of 4,096 a
model that ignores it passes any test of a few dozen tokens.

In float32 the limit is absolute. In a narrower type two right implementations already differ visibly, so the limit is
a multiple of how far transformers' own sdpa and eager attention differ on the same sequences, as a root mean square
(single logits are noise there). Where sdpa can't do what the model asks, the type's precision stands in. A mixture of
experts may, once in a while, choose another expert over a rounding error; a failure is therefore repeated with other
sequences before it counts.

All that runs with a dense cache. A quantized one is then tested against itself (`run_format_test`): the backend that
will serve against the reference backend, both reading the same narrow rows. What the rounding costs in quality is not
asked here: engine_worker/evaluate.py measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model.attention import NAME, AttentionBackend, AttentionCall
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.errors import ModelError
from engine_worker.model.families import num_layers
from engine_worker.model.kv_format import DENSE, KVFormat
from engine_worker.model.kv_tensors import KVLayout, KVTensors
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.packing import BlockTables, PackedBatch, pack

FLOAT32_LIMIT = 1e-3  # largest difference over the logits' standard deviation; rounding stays below 1e-4
FORMAT_LIMIT = 0.05  # root mean square over the logits' standard deviation; right backends stay near 0.02 on 30 layers
NOISE_FACTOR = 3.0  # how far beyond transformers' own disagreement a narrower type may go
SHRUNKEN = 4  # tokens of a window or an attention chunk during the test

_WINDOW_NAMES = ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size", "chunk_size")
_NUM_TRIES = 2
_NUM_STEPS = 4


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """`error` against `limit` in the measure that `detail` names, and the cache rows that the forwards produced."""

    error: float
    limit: float
    layout: KVLayout
    detail: str


def run_self_test(
    module: PreTrainedModel, backend: AttentionBackend, block_size: int, max_model_len: int
) -> SelfTestReport:
    """Compare packed and plain execution. Raises ModelError if they disagree or the model can't be packed."""
    block_size = min(block_size, 16)
    lengths = [min(length, max_model_len) for length in (block_size + 5, 7, 2 * block_size + 3)]
    with _shrunken_windows(module):
        for seed in range(_NUM_TRIES):
            sequences = _random_sequences(module, lengths, seed)
            watched = _Watched(backend)
            logits, layout = _packed_logits(module, watched, sequences, block_size, seed)
            report = _compare(module, sequences, logits, layout, watched.is_plain)
            if report.error <= report.limit:
                return report
    raise ModelError(
        f"{type(module).__name__} failed the self-test: run packed and paged, its logits are off by "
        f"{report.error:.2g} of their spread (at most {report.limit:.2g} is rounding). It would give wrong answers, so "
        "it is refused. Try --attention-backend reference; if that passes, the fast backend is at fault."
    )


def run_format_test(
    module: PreTrainedModel, backend: AttentionBackend, form: KVFormat, block_size: int, max_model_len: int
) -> str:
    """Compare the backend with the reference one over a cache in `form`; a line about it. Raises ModelError.

    A rounding error of float32 can tip a stored number to its neighbour, so the measure is a root mean square and the
    limit is wide; rows or scales read from the wrong place change everything.
    """
    block_size = min(block_size, 16)
    lengths = [min(length, max_model_len) for length in (block_size + 5, 7, 2 * block_size + 3)]
    sequences = _random_sequences(module, lengths, 0)
    ours, _ = _packed_logits(module, backend, sequences, block_size, 0, form)
    theirs, _ = _packed_logits(module, ReferenceBackend(), sequences, block_size, 0, form)
    error = _rms(torch.cat(ours) - torch.cat(theirs), torch.cat(theirs).std())
    limit = max(FORMAT_LIMIT, NOISE_FACTOR * 2 * torch.finfo(module.dtype).eps)
    if not error <= limit:
        raise ModelError(
            f"{type(module).__name__} failed the self-test with a KV cache in {form.name}: its logits are off by "
            f"{error:.2g} of their spread from the reference backend's (at most {limit:.2g} is rounding). "
            "Use --kv-cache-dtype auto, or --attention-backend reference."
        )
    return f"KV cache in {form.name} reads as it should (logit error {error:.1g})"


def probe_layout(module: PreTrainedModel, backend: AttentionBackend) -> KVLayout:
    """The cache's shapes, from a forward over two tokens."""
    sequences = [[0, 1]]
    return _packed_logits(module, backend, sequences, block_size=16, seed=0)[1]


# -- ours


class _Watched:
    """The backend, noting whether all that was asked of it is plain softmax attention, which sdpa knows too."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.name = backend.name
        self.is_plain = True
        self._backend = backend

    def attend(self, call: AttentionCall, batch: PackedBatch, kv: KVTensors) -> torch.Tensor:
        self.is_plain = self.is_plain and call.softcap is None and call.sinks is None
        return self._backend.attend(call, batch, kv)


def _packed_logits(
    module: PreTrainedModel,
    backend: AttentionBackend,
    sequences: list[list[int]],
    block_size: int,
    seed: int,
    form: KVFormat = DENSE,
) -> tuple[list[torch.Tensor], KVLayout]:
    """Teacher-forced logits [length, V] of each sequence, computed in mixed chunks; and the cache's layout."""
    layers = num_layers(module)
    num_blocks = sum(-(-len(ids) // block_size) for ids in sequences) + 1
    kv = KVTensors(layers, num_blocks, block_size, module.device, format=form)
    model = PackedModel(module, backend, kv)
    tables = BlockTables(len(sequences), num_blocks, block_size)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    requests = []
    for index, ids in enumerate(sequences):
        request = Request(
            request_id=str(index), prompt_ids=tuple(ids), params=SamplingParams(max_tokens=1), arrival_s=0.0
        )
        request.block_ids = [BlockId(order.pop()) for _ in range(-(-len(ids) // block_size))]
        requests.append(request)

    collected: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
    for step in range(_NUM_STEPS):
        segments = [_segment(request, step, block_size) for request in requests]
        _run_step(model, tables, [segment for segment in segments if segment is not None], collected)
        if sorted(model.last_calls) != list(range(layers)):
            raise ModelError(
                f"{type(module).__name__} has {layers} layers but attended in layers {sorted(model.last_calls)}: "
                "it gets around paged attention, so it can't be served."
            )
    logits = [torch.stack([rows[position] for position in sorted(rows)]) for rows in collected]
    return logits, kv.layout()


def _segment(request: Request, step: int, block_size: int) -> Segment | None:
    """This step's chunk. Requests differ in where they cut, and each has a chunk of a single token."""
    length, turn = len(request.prompt_ids), int(request.request_id) % 3
    cuts = {
        0: [0, length // 2, length // 2 + 1, length - 1, length],  # prefill, decode, prefill, decode
        1: [0, 1, length // 2, length // 2 + 1, length],  # one token, prefill, decode, prefill
        2: [0, 0, length // 3, length - 1, length],  # joins late
    }[turn]
    start, end = cuts[step], cuts[step + 1]
    if start >= end:
        return None
    blocks = request.block_ids[: -(-end // block_size)]
    return Segment(request, start, request.prompt_ids[start:end], blocks, sample=True)


def _run_step(
    model: PackedModel, tables: BlockTables, segments: list[Segment], collected: list[dict[int, torch.Tensor]]
) -> None:
    if not segments:
        return
    batch = pack(segments, tables, model.device)
    owners = [
        (int(segment.request.request_id), segment.end - 1 - back, last - back)
        for segment, last in zip(segments, batch.last_index, strict=True)
        for back in range(len(segment.token_ids))
    ]
    owners.sort(key=lambda owner: -owner[2])  # reversed: rows must come in the order asked for
    logits = model.forward(batch, [index for _, _, index in owners])
    assert logits is not None
    for (sequence, position, _), row in zip(owners, logits, strict=True):
        collected[sequence][position] = row


# -- theirs


def _compare(
    module: PreTrainedModel,
    sequences: list[list[int]],
    logits: list[torch.Tensor],
    layout: KVLayout,
    sdpa_is_right: bool,
) -> SelfTestReport:
    ours = torch.cat(logits)
    eager = _plain_logits(module, sequences, "eager")
    spread = eager.std()
    if layout.dtype == torch.float32:
        error = float((ours - eager).abs().max() / spread)
        return SelfTestReport(error, FLOAT32_LIMIT, layout, f"self-test passed (largest logit error {error:.1g})")
    error = _rms(ours - eager, spread)
    noise = 2 * torch.finfo(layout.dtype).eps
    if module._supports_sdpa and sdpa_is_right:  # some families offer it although it leaves their softcap out
        noise = max(noise, _rms(_plain_logits(module, sequences, "sdpa") - eager, spread))
    detail = f"self-test passed (logit error {error:.1g}, where {noise:.1g} is this type's noise)"
    return SelfTestReport(error, NOISE_FACTOR * noise, layout, detail)


def _rms(difference: torch.Tensor, spread: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt() / spread)


@torch.inference_mode()
def _plain_logits(module: PreTrainedModel, sequences: list[list[int]], implementation: str) -> torch.Tensor:
    """Logits [total length, V] in float32 by one of transformers' own attentions, each sequence alone."""
    module.set_attn_implementation(implementation)
    try:
        rows = [
            module(input_ids=torch.tensor([ids], device=module.device), use_cache=False).logits[0].float()
            for ids in sequences
        ]
    finally:
        module.set_attn_implementation(NAME)
    return torch.cat(rows)


def _random_sequences(module: PreTrainedModel, lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1234 + seed)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def _shrunken_windows(module: PreTrainedModel) -> Iterator[None]:
    """Make every window and attention chunk SHRUNKEN tokens, wherever the family keeps it; put all back afterwards."""
    owners: dict[int, Any] = {}
    for part in module.modules():
        owners[id(part)] = part
        config = getattr(part, "config", None)
        if config is not None:
            owners[id(config)] = config
            text = config.get_text_config(decoder=True)
            owners[id(text)] = text
    saved: list[tuple[Any, str, int]] = []
    for owner in owners.values():
        for name in _WINDOW_NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > SHRUNKEN:
                saved.append((owner, name, value))
                setattr(owner, name, SHRUNKEN)
    try:
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
