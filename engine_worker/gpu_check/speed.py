"""How fast is it, against what the device can copy and multiply?"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_worker.core.types import SamplingParams
from engine_worker.gpu_check.engine import Engine, load, write_config
from engine_worker.gpu_check.report import Report

# Dimensions of a common 8-billion-parameter model.
LARGE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class Limits:
    """What the device does at best, measured: bytes a second read, multiplications and additions a second."""

    def __init__(self, report: Report, device: torch.device, tiny: bool) -> None:
        elements = 1 << 20 if tiny else 1 << 30
        source = torch.ones(elements, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        self.bytes_per_s = 2 * source.numel() * 2 / best_of(lambda: target.copy_(source), device)
        size = 256 if tiny else 8192
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        self.flops_per_s = 2 * size**3 / best_of(lambda: a @ b, device)
        report.add("copy, bytes read and written", self.bytes_per_s / 1e9, "GB/s")
        report.add(f"matrix product, {size} cubed, {dtype}", self.flops_per_s / 1e12, "TFLOP/s")


def best_of(run: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Seconds of the fastest run, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class LargeModel:
    """The large dummy model under load."""

    def __init__(self, report: Report, device: torch.device, folder: Path, limits: Limits, tiny: bool) -> None:
        self.report, self.device, self.limits, self.tiny = report, device, limits, tiny
        self._path = write_config(folder / "large", **{**LARGE, **(_SMALL if tiny else {})})
        self._vocab = 512 if tiny else LARGE["vocab_size"]

    def load(self, **settings: Any) -> Engine:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
        if not self.tiny:
            sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 16_384}
        if self.device.type != "cuda":
            settings = {"kv_cache_memory": 16 << 20, "self_test": False, **settings}
        backend = "triton" if "attention_backend" not in settings else settings.pop("attention_backend")
        begin = time.perf_counter()
        engine, _ = load(self._path, str(self.device), attention_backend=backend, **sizes, **settings)
        self.report.add("loading", time.perf_counter() - begin, "s")
        info = engine.runner.info
        self.report.add("KV cache", float(info.num_blocks * info.block_size), "tokens", info.num_blocks > 0)
        return engine

    def prompt(self, length: int, salt: int) -> list[int]:
        return [(31 * i + 7919 * salt) % (self._vocab - 10) + 5 for i in range(length)]

    def dense(self) -> None:
        engine = self.load()
        model = engine.runner._model
        params = sum(p.numel() for p in model.module.parameters())
        params -= model.module.get_input_embeddings().weight.numel()
        batches = (1, 2) if self.tiny else (1, 8, 32, 128, 256)
        length, steps = (9, 3) if self.tiny else (256, 48)
        for batch in batches:
            step_s = self.decode(engine, batch, length, steps)
            self.report.add(f"decode, {batch} at once", batch / step_s, "tokens/s")
            if batch == 1:
                share = 2 * params / step_s / self.limits.bytes_per_s
                self.report.add("decode, 1 at once: share of the copy's bandwidth", share)
            synchronous = self.decode(engine, batch, length, steps, ahead=False)
            self.report.add(f"decode, {batch}: gain of asynchronous steps", synchronous / step_s, "times")
        if model.graphs is not None:
            graphs, model.graphs = model.graphs, None
            for batch in batches[:3]:
                eager = self.decode(engine, batch, length, steps)
                model.graphs = graphs
                recorded = self.decode(engine, batch, length, steps)
                model.graphs = None
                self.report.add(f"decode, {batch}: gain of CUDA graphs", eager / recorded, "times")
            model.graphs = graphs
        self._prefill(engine, params)

    def _prefill(self, engine: Engine, params: int) -> None:
        lengths = (48,) if self.tiny else (1024, 4096, 8000)
        for length in lengths:
            engine.run([self.prompt(length, 900 + length)], sampling(1))  # compiles what this shape needs
            cold = engine.run([self.prompt(length, 1000 + length)], sampling(1)).first_s["0"]
            share = 2 * params * length / cold / self.limits.flops_per_s
            self.report.add(f"prefill, {length} tokens", length / cold, "tokens/s")
            self.report.add(f"prefill, {length} tokens: share of the matrix product", share)
            warm = engine.run([[*self.prompt(length, 1000 + length), 7]], sampling(1))
            self.report.add(f"TTFT, {length} tokens, cold", cold * 1e3, "ms")
            ok = warm.num_cached_tokens >= length - engine.runner.info.block_size
            self.report.add(f"TTFT, {length} tokens, warm", warm.first_s["0"] * 1e3, "ms", ok)

    def variant(self, batches: tuple[int, ...] = (1, 32), **settings: Any) -> None:
        """Decoding and one prompt with other settings."""
        engine = self.load(**settings)
        self.report.add("weights", engine.runner.info.weight_bytes / 2**30, "GiB")
        for batch in (1, 2) if self.tiny else batches:
            step_s = self.decode(engine, batch, 9 if self.tiny else 256, 3 if self.tiny else 32)
            self.report.add(f"decode, {batch} at once", batch / step_s, "tokens/s")
        length = 48 if self.tiny else 4096
        engine.run([self.prompt(length, 5)], sampling(1))
        cold = engine.run([self.prompt(length, 6)], sampling(1)).first_s["0"]
        self.report.add(f"prefill, {length} tokens", length / cold, "tokens/s")

    def decode(self, engine: Engine, batch: int, length: int, steps: int, *, ahead: bool = True) -> float:
        """Seconds of a step of `batch` decodes, each behind a prompt of its own; raises where a request failed."""
        self._salt = getattr(self, "_salt", 0) + 1
        texts = [self.prompt(length, 300 * self._salt + index) for index in range(batch)]
        run = engine.run(texts, sampling(steps), ahead=ahead)
        if run.errors:
            raise RuntimeError(run.errors[0])
        return run.decode_step_s(batch)
