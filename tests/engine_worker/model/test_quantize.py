"""What quantization costs on the demo model: the bounds of engine_worker.evaluate, on the text that comes along.

The models are loaded as a worker loads them by default: by the native kernels where they can be had. They read half of
the text, 455 tokens. There int8 raises the perplexity by 0.4 % and agrees with the dense model at 94.7 % of the
positions; int8 weights rounded to six bits by 6.6 % and at 84.8 %.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer

from engine_worker.config import EngineConfig
from engine_worker.core.types import FinishReason
from engine_worker.evaluate import BOUNDS, TEXT, Comparison, Reading, read_text
from engine_worker.model import quantize as quantize_module
from engine_worker.model.load import load_model
from engine_worker.model.native import kernels
from engine_worker.model.native.kernels import Quantized
from tests.engine_worker.model.serving import TinyEngine

pytestmark = [pytest.mark.engine, pytest.mark.e2e]

CONFIG = EngineConfig(
    model="demo",
    dtype="float32",
    device="cpu",
    num_threads=1,
    max_model_len=1024,
    max_num_seqs=1,
    kv_cache_memory=1 << 27,
    self_test=False,  # test_load.py has it for quantized models, too
)
TEXT_LENGTH = 2000  # characters
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def _keep_threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def reading(kind: str) -> Reading:
    return read(kind)


def read(kind: str) -> Reading:
    return read_text(replace(CONFIG, quantization=kind), TEXT.read_text(encoding="utf-8")[:TEXT_LENGTH])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quality_stays_within_the_stated_bounds(kind: str) -> None:
    found = Comparison(reading(""), reading(kind))
    max_increase, min_agreement = BOUNDS[kind]
    assert found.increase <= max_increase
    assert found.agreement >= min_agreement
    assert found.quantized.weight_bytes < found.dense.weight_bytes * (0.26 if kind == "int8" else 0.18)


def test_int4_gives_back_weights_that_came_from_four_bits() -> None:
    """The demo model's file is in Q4_1. What is left is its head in int8."""
    found = Comparison(reading(""), reading("int4"))
    assert abs(found.increase) < 0.01
    assert found.agreement > 0.95


def test_int4_of_weights_on_no_grid_stays_within_the_stated_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With columns in another order its groups are not the file's: so it is for a model that was never quantized."""
    quantize = kernels.quantize

    def shuffled(weight: torch.Tensor, kind: str, importance: torch.Tensor | None = None) -> Quantized:
        if kind != "int4" or importance is None:  # None: the kernels' own trial
            return quantize(weight, kind)
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        found = quantize(weight[:, order], kind, importance=importance[order]).dequantize()
        return Quantized("float32", torch.empty_like(found).index_copy_(1, order, found), None, 0)

    monkeypatch.setattr(kernels, "quantize", shuffled)
    found = Comparison(reading(""), read("int4"))
    max_increase, min_agreement = BOUNDS["int4"]
    assert 0.01 < found.increase <= max_increase
    assert found.agreement >= min_agreement


def test_weights_rounded_coarser_miss_the_bounds_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six bits instead of eight: the bounds are tight enough to see the loss of two."""
    quantize = kernels.quantize

    def coarser(weight: torch.Tensor, kind: str, importance: torch.Tensor | None = None) -> Quantized:
        found = quantize(weight, kind, importance=importance)
        return replace(found, values=(found.values.float() / 4).round().clamp(-31, 31).to(torch.int8) * 4)

    monkeypatch.setattr(kernels, "quantize", coarser)
    monkeypatch.setattr(quantize_module, "quantize", coarser)
    found = Comparison(reading(""), read("int8"))
    max_increase, min_agreement = BOUNDS["int8"]
    assert found.increase > max_increase
    assert found.agreement < min_agreement


def test_the_int8_model_answers_greedily_as_it_should() -> None:
    runner = load_model(replace(CONFIG, quantization="int8"), lambda message: None)
    tokenizer = Tokenizer.from_str(runner.tokenizer.tokenizer_json)
    model = runner._model
    engine = TinyEngine(model.module, backend=model.backend)
    answer = engine.run([tokenizer.encode(QUESTION, add_special_tokens=False).ids], 12)[0]
    assert answer.finish_reason is FinishReason.LENGTH
    assert "Paris" in tokenizer.decode(answer.token_ids)
