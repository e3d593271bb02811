"""Is it right on this device? Kernels against the reference, models against transformers, modes against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.gpu_check.engine import load, write_config
from engine_worker.gpu_check.report import Report
from engine_worker.model.attention import AttentionBackend, AttentionCall
from engine_worker.model.backend_reference import ReferenceBackend
from engine_worker.model.backends import make_backend
from engine_worker.model.kv_format import choose_format
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.masks import MaskTag
from engine_worker.model.packing import BlockTables, pack

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 16},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention to be tried: requests with a past (tokens before, tokens now), heads, dims and what masks them."""

    spans: tuple[tuple[int, int], ...] = ((0, 70), (33, 1), (600, 1), (50, 90), (5, 3))
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    block_size: int = 16
    window: int = 0
    softcap: float | None = None
    sinks: bool = False
    kv: str = "auto"
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "bf16": Shape(),
    "float32": Shape(dtype=torch.float32),
    "float16, 7 heads a key head": Shape(heads=(14, 2), dtype=torch.float16),
    "window 40": Shape(window=40),
    "soft cap": Shape(softcap=20.0),
    "sinks, window": Shape(sinks=True, window=40),
    "dims 80": Shape(dims=(80, 80)),
    "dims 192 and 128": Shape(dims=(192, 128), heads=(4, 4)),
    "dims 256": Shape(dims=(256, 256)),
    "blocks of 7": Shape(block_size=7),
    "many decodes": Shape(spans=tuple((17 * i, 1) for i in range(64))),
    "int8 KV": Shape(kv="int8"),
    "fp8 KV": Shape(kv="fp8"),
    "fp4 KV": Shape(kv="fp4"),
    "k8v4 KV": Shape(kv="k8v4"),
}


# What FlashInfer's kernels can do of it.
FLASHINFER_SHAPES = (
    "bf16",
    "float16, 7 heads a key head",
    "window 40",
    "soft cap",
    "dims 256",
    "blocks of 7",
    "many decodes",
)


def attention_of(shape: Shape, backend: AttentionBackend, device: torch.device) -> torch.Tensor:
    """What a backend answers when the past was written by the reference. Inputs depend on the shape alone."""
    generator = torch.Generator().manual_seed(1)
    size, (num_heads, num_kv_heads), (key_dim, value_dim) = shape.block_size, shape.heads, shape.dims
    counts = [-(-(past + now) // size) for past, now in shape.spans]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    kv = KVTensors(1, sum(counts), size, device, format=choose_format(shape.kv, device))
    tables = BlockTables(len(counts), max(counts), size)
    function = sliding_window_causal_mask_function(shape.window) if shape.window else causal_mask_function
    sinks = torch.randn(num_heads, generator=generator).to(device, shape.dtype) if shape.sinks else None
    out = torch.empty(0)
    requests = []
    for index, (past, now) in enumerate(shape.spans):
        params = SamplingParams(max_tokens=1)
        request = Request(request_id=str(index), prompt_ids=(0,) * (past + now), params=params, arrival_s=0.0)
        request.block_ids = [BlockId(order.pop()) for _ in range(counts[index])]
        requests.append(request)
    for turn in (0, 1):
        segments = []
        for request, (past, now) in zip(requests, shape.spans, strict=True):
            start, end = (0, past) if turn == 0 else (past, past + now)
            if end > start:
                segments.append(Segment(request, start, request.prompt_ids[start:end], request.block_ids, True))
        if not segments:
            continue
        batch = pack(segments, tables, device)

        def made(heads: int, dim: int, num_tokens: int = batch.num_tokens) -> torch.Tensor:
            values = torch.randn(1, num_tokens, heads, dim, generator=generator)
            return values.to(device, shape.dtype).transpose(1, 2)

        query, key, value = made(num_heads, key_dim), made(num_kv_heads, key_dim), made(num_kv_heads, value_dim)
        call = AttentionCall(0, query, key, value, MaskTag(function), key_dim**-0.5, shape.softcap, sinks)
        out = (ReferenceBackend() if turn == 0 else backend).attend(call, batch, kv)
    return out.float()


def kernels(
    report: Report, device: torch.device, backend_name: str, tiny: bool, names: Sequence[str] = tuple(SHAPES)
) -> None:
    backend = make_backend(backend_name, device, 4096)
    for name in names:
        full = SHAPES[name]
        shape = full
        if tiny:
            shape = replace(full, spans=((0, 9), (17, 1), (3, 2)), heads=(2, 1), dims=(16, 16))
        expected = attention_of(shape, ReferenceBackend(), device)
        found = attention_of(shape, backend, device)
        error = float((found - expected).abs().max() / expected.abs().max())
        limit = 2e-5 if shape.dtype == torch.float32 else 2e-2
        report.add(f"{backend_name} against reference: {name}", error, "of the largest", error <= limit)


def tiny_config(family: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,  # answers that wander
        **TINY[family],
        **more,
    }


def prompts(tiny: bool) -> list[list[int]]:
    lengths = (5, 21) if tiny else (5, 40, 17, 80)
    return [[(7 * i + 13 * length) % 500 + 3 for i in range(length)] for length in lengths]


def families(report: Report, device: torch.device, folder: Path, backend_name: str, tiny: bool) -> None:
    """Greedy answers of tiny models in float32 against transformers' own generate, each prompt alone."""
    params = replace(GREEDY, max_tokens=4) if tiny else GREEDY
    for family in ("llama", "gemma2") if tiny else TINY:
        path = write_config(folder / family, **tiny_config(family))
        settings = {"dtype": "float32", "attention_backend": backend_name, "max_num_seqs": 8, "max_model_len": 256}
        engine, _ = load(path, str(device), kv_cache_memory=32 << 20, **settings)
        found = engine.run(prompts(tiny), params)
        module = engine.runner._model.module
        wrong = 0
        for index, prompt in enumerate(prompts(tiny)):
            wrong += found.tokens[str(index)] != _greedy(module, prompt, params.max_tokens)
        report.add(f"{family}: answers unlike transformers'", float(wrong), f"of {len(prompts(tiny))}", wrong == 0)


@torch.inference_mode()
def _greedy(module: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' eager attention over the whole text, token by token."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        ids = list(prompt)
        for _ in range(max_tokens):
            logits = module(input_ids=torch.tensor([ids], device=module.device), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    finally:
        module.set_attn_implementation(before)
    return ids[len(prompt) :]


def modes(report: Report, device: torch.device, folder: Path, backend_name: str, tiny: bool) -> None:
    """The same answers with graphs, asynchronous steps and a warm cache; sampling; narrow weights and caches run."""
    path = write_config(folder / "modes", **tiny_config("llama"))
    params = replace(GREEDY, max_tokens=4) if tiny else GREEDY
    base: dict[str, Any] = {
        "dtype": "float32",
        "attention_backend": backend_name,
        "max_num_seqs": 8,
        "max_model_len": 256,
    }
    base |= {"kv_cache_memory": 32 << 20, "self_test": not tiny}
    texts = prompts(tiny)
    engine, _ = load(path, str(device), **base)
    model = engine.runner._model
    expected = engine.run(texts, params).tokens
    if model.graphs is not None:
        graphs, model.graphs = model.graphs, None
        found = engine.run(texts, params).tokens
        model.graphs = graphs
        report.add("CUDA graphs on and off give the same", str(found == expected), ok=found == expected)
    elif device.type == "cuda" and backend_name == "triton":
        report.add("CUDA graphs", "not recorded", ok=False)
    warm = engine.run(texts, params)
    ok = warm.tokens == expected and warm.num_cached_tokens > 0
    report.add("a warm prefix cache gives the same", float(warm.num_cached_tokens), "tokens cached", ok)
    found = engine.run(texts, params, ahead=True)
    report.add("asynchronous steps give the same", float(found.num_ahead), "ahead", found.tokens == expected)
    sampling = replace(params, temperature=0.9, top_p=0.9, seed=5)
    drawn, again = engine.run(texts, sampling), engine.run(texts, sampling, ahead=True)
    report.add("seeded draws, synchronous and not, are the same", str(True), ok=drawn.tokens == again.tokens)
    for setting in ("int8", "k8v4") if tiny else ("int8", "fp8", "fp4", "k8v4"):
        run = load(path, str(device), **base, kv_cache_dtype=setting)[0].run(texts, params)
        report.add(f"{setting} KV cache runs", _agreement(run.tokens, expected), "agree", not run.errors)
    kinds = ("int8", "int4", "fp8") if device.type == "cuda" else ("int8", "int4")
    for kind in kinds:
        dtype = {"dtype": "bfloat16"} if device.type == "cuda" else {}
        run = load(path, str(device), **{**base, **dtype, "quantization": kind})[0].run(texts, params)
        report.add(f"{kind} weights run", _agreement(run.tokens, expected), "agree", not run.errors)


def flashinfer(report: Report, device: torch.device, folder: Path) -> None:
    """FlashInfer's kernels against the reference; then steps queued behind each other against steps one by one."""
    kernels(report, device, "flashinfer", False, FLASHINFER_SHAPES)
    path = write_config(folder / "flashinfer", **tiny_config("llama", head_dim=64))
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 256}
    settings["kv_cache_memory"] = 32 << 20
    engine, _ = load(path, str(device), attention_backend="flashinfer", **settings)
    expected = engine.run(prompts(False), GREEDY)
    found = engine.run(prompts(False), GREEDY, ahead=True)
    report.add("asynchronous steps give the same", float(found.num_ahead), "ahead", found.tokens == expected.tokens)


def _agreement(found: dict[str, list[int]], expected: dict[str, list[int]]) -> float:
    pairs = [(a, b) for name in expected for a, b in zip(found[name], expected[name], strict=False)]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))
