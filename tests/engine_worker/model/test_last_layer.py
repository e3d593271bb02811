"""The last layer for the positions that are read alone: everything comes out as if it had been computed for all.

What an engine answers, scores and keeps in its cache is held against an engine over the same model that computes every
position to the end. Both go through the native kernels; that these are right is the business of other tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from engine_worker.core.types import BlockId, Request, SampledToken, SamplingParams, Segment
from engine_worker.model.attention import StepContext, step_context
from engine_worker.model.backend_native import NativeBackend
from engine_worker.model.kv_format import choose_format
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.packing import BlockTables, PackedBatch, pack
from engine_worker.model.prepare import prepare_module
from tests.engine_worker.model.native import AUTO, INSTRUCTION_SETS, library_for
from tests.engine_worker.model.serving import TinyEngine
from tests.engine_worker.model.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.engine

# In panels of 32 columns: queries and keys meet within one, between two, within the third.
SHAPES = {
    "half a panel": {"hidden_size": 48},
    "whole panels": {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8},
    "a head a query": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 20},
}
BLOCK_SIZE, NUM_BLOCKS = 4, 64


@cache
def prepared(isa: str, shape: str, quantization: str) -> tuple[Any, NativeBackend]:
    library = library_for(isa)
    backend = NativeBackend(library)
    module = tiny_model("llama", attention_bias=True, **SHAPES[shape])
    details = prepare_module(module, torch.float32, library, backend, quantization, lambda message: None).details
    assert "3 of 3 layers fused, into one call with embedding and head" in details
    return module, backend


class EveryPosition(PackedModel):
    """Computes every position to the end, and then picks."""

    def forward(self, batch: PackedBatch, keep: list[int]) -> torch.Tensor | None:
        logits = self.forward_all(batch)
        return logits[keep] if keep else None


def steps() -> Iterator[list[tuple[int, int, int]]]:
    """Mixed chunks (request, start, end) of four sequences: prompts in pieces, decodes, many and few of each."""
    yield [(0, 0, 13), (1, 0, 1), (2, 0, 70)]
    yield [(0, 13, 14), (1, 1, 30), (2, 70, 71), (3, 0, 9)]
    yield [(0, 14, 15), (1, 30, 31), (2, 71, 72), (3, 9, 10)]
    yield [(2, 72, 76), (0, 15, 25)]


def batches() -> Iterator[PackedBatch]:
    rng = random.Random(3)
    tables = BlockTables(4, NUM_BLOCKS, BLOCK_SIZE)
    requests = []
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    for name in range(4):
        ids = tuple(rng.randrange(3, VOCAB) for _ in range(80))
        request = Request(request_id=str(name), prompt_ids=ids, params=SamplingParams(max_tokens=1), arrival_s=0.0)
        request.block_ids = [BlockId(free.pop()) for _ in range(len(ids) // BLOCK_SIZE if name == 2 else 10)]
        requests.append(request)
    for step in steps():
        yield pack(
            [
                Segment(requests[name], start, requests[name].prompt_ids[start:end], requests[name].block_ids, True)
                for name, start, end in step
            ],
            tables,
            torch.device("cpu"),
        )


def choices(batch: PackedBatch) -> Iterator[list[int]]:
    """Positions to read: none, each span's last, some in runs, all but one; in any order and some of them twice."""
    everything = list(range(batch.num_tokens))
    yield []
    yield batch.last_index
    yield [batch.last_index[-1], *batch.last_index]
    yield everything[-1:0:-3]
    yield [i for i in everything if i % 7 > 2]
    yield everything[1:]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp4", "k8v4"])
@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_logits_and_cache_are_those_of_the_whole_layer(
    isa: str, shape: str, quantization: str, kv_cache_dtype: str
) -> None:
    if quantization == "int4" and shape != "whole panels":
        pytest.skip("4-bit weights have groups of 32, so queries fill panels")
    module, backend = prepared(isa, shape, quantization)
    form = choose_format(kv_cache_dtype, torch.device("cpu"))
    ours, theirs = (
        cls(module, backend, KVTensors(3, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"), format=form))
        for cls in (PackedModel, EveryPosition)
    )
    for batch in batches():
        for keep in choices(batch):
            found, expected = ours.forward(batch, keep), theirs.forward(batch, keep)
            assert (found is None) == (expected is None) == (not keep)
            if found is not None and expected is not None:
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            for layer in range(3):
                for mine, full in zip(ours.kv.rows(layer), theirs.kv.rows(layer), strict=True):
                    assert all(map(torch.equal, mine.tensors(), full.tensors()))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_what_is_not_read_is_not_computed(isa: str) -> None:
    module, backend = prepared(isa, "half a panel", "")
    batch = next(batches())
    rows = torch.tensor([2, 3, batch.num_tokens - 1])
    hidden = []
    for needed in (None, rows):
        kv = KVTensors(3, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"))
        with step_context(StepContext(backend, batch, kv, needed)), torch.inference_mode():
            inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
            hidden.append(module.base_model(**inputs, use_cache=False).last_hidden_state[0])
    same = [torch.allclose(a, b, atol=1e-4) for a, b in zip(*hidden, strict=True)]
    assert [index for index, is_same in enumerate(same) if is_same] == rows.tolist()


def guesser(answers: list[list[int]], prompts: list[list[int]]) -> Callable[[Request, int], list[int]]:
    """Guesses at the answers, every third of them spoilt."""
    known = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=False)}

    def guess(request: Request, most: int) -> list[int]:
        begin = len(request.output_ids)
        coming = list(enumerate(known[request.prompt_ids][begin : begin + most], begin))
        return [5 if index % 3 == 2 else token_id for index, token_id in coming]

    return guess


def served(
    kind: type[PackedModel], quantization: str, kv_cache_dtype: str, speculates: bool, **settings: Any
) -> tuple[list[list[int]], dict[str, list[SampledToken]], int]:
    """Tokens, prompt scores and right guesses: of prompts with scores or without, and of three choices of one."""
    module, backend = prepared(AUTO, "whole panels", quantization)
    rng = random.Random(11)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (30, 5, 17, 41)]
    guess = None
    if speculates:
        guess = guesser(served(EveryPosition, quantization, kv_cache_dtype, False)[0], prompts)
    engine = TinyEngine(module, backend=backend, kv_cache_dtype=kv_cache_dtype, guess=guess, **settings)
    engine.model = engine.runner._model = kind(module, backend, engine.model.kv)
    found = engine.record_prompt_scores()
    ids = []
    for prompt in prompts:
        scores = 2 if len(prompt) % 2 else None
        ids.append(engine.add(prompt, SamplingParams(max_tokens=12, temperature=0.0, num_prompt_logprobs=scores)))
    leader = None
    for choice in range(3):
        name, params = f"choice {choice}", SamplingParams(max_tokens=12, temperature=0.7, seed=choice)
        engine.scheduler.add(
            Request(request_id=name, prompt_ids=tuple(prompt), params=params, arrival_s=9.0, leader_id=leader)
        )
        leader = leader or name
        ids.append(name)
    answers: dict[str, Any] = {}
    while engine.scheduler.has_work():
        engine.step(answers)
    return [answers[name].token_ids for name in ids], found, engine.scheduler.stats().num_accepted_tokens


@pytest.mark.parametrize("settings", [{}, {"budget": 16}, {"budget": 9, "num_blocks": 24}], ids=str)
@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "guessing"])
@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"), [("", "auto"), ("", "int8"), ("int8", "fp4"), ("int4", "k8v4")]
)
def test_a_crowd_is_served_alike(
    quantization: str, kv_cache_dtype: str, speculates: bool, settings: dict[str, Any]
) -> None:
    ours, theirs = (
        served(kind, quantization, kv_cache_dtype, speculates, **settings) for kind in (PackedModel, EveryPosition)
    )
    assert ours[0] == theirs[0]
    assert all(len(tokens) == 12 for tokens in ours[0])
    assert ours[2] == theirs[2]
    assert (ours[2] > 0) == speculates
    assert ours[1].keys() == theirs[1].keys()
    assert sum(map(len, ours[1].values())) == 4 + 16 + 40
    for name, scores in ours[1].items():
        for mine, full in zip(scores, theirs[1][name], strict=True):
            assert (mine.token_id, mine.rank) == (full.token_id, full.rank)
            assert mine.logprob == pytest.approx(full.logprob, abs=1e-4)
