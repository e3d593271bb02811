"""Recorded decode steps, with a recorder that runs the forward again: buffers, padding and sizes are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine_worker.config import EngineConfig
from engine_worker.model.cuda_graphs import default_sizes
from engine_worker.model.cuda_setup import profiled_budget, record_graphs
from engine_worker.model.kv_tensors import KVTensors
from engine_worker.model.memory import NotEnoughMemory, num_kv_blocks
from engine_worker.model.packed_model import PackedModel
from engine_worker.model.profile import kv_budget, largest_step
from engine_worker.model.self_test import probe_layout
from tests.engine_worker.model.interpreted import triton_backend
from tests.engine_worker.model.serving import TinyEngine
from tests.engine_worker.model.tiny_models import tiny_model

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


@dataclass
class Rerun:
    """Stands for a CUDA graph: `replay` runs the forward over the same buffers, into the same output."""

    run: Callable[[], Tensor]
    output: Tensor
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.output.copy_(self.run())


class Recorder:
    def __init__(self) -> None:
        self.made: list[Rerun] = []

    def __call__(self, run: Callable[[], Tensor]) -> Rerun:
        self.made.append(Rerun(run, run().clone()))
        return self.made[-1]


def test_recorded_steps_give_the_same_tokens() -> None:
    """Batches of 3 and 2 in graphs of 4 and 2, prefills and a lonely size beyond them eagerly; sliding windows."""
    module = tiny_model("mistral")
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [3]]
    plain = TinyEngine(module, backend=triton_backend(), num_blocks=16)
    expected = plain.run(prompts, 4)
    engine = TinyEngine(module, backend=triton_backend(), num_blocks=16)
    kv = engine.model.kv
    engine.model.kv = KVTensors(kv.num_layers, 17, kv.block_size, CPU, probe_layout(module, engine.model.backend))
    config = EngineConfig(model="tiny", block_size=kv.block_size, cuda_graph_sizes=(2, 4))
    recorder, lines = Recorder(), []
    detail = record_graphs(config, engine.model, 16, 64, lines.append, recorder)
    assert "2 batch sizes up to 4" in detail
    found = engine.run(prompts, 4)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for row, other in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(row, other, atol=1e-4, rtol=1e-4)
    assert recorder.made[0].num_replays == 3  # the largest is recorded first
    assert recorder.made[1].num_replays == 0


def test_what_cannot_be_recorded_runs_eagerly_and_says_so() -> None:
    module = tiny_model("llama")
    model = PackedModel(module, triton_backend(), KVTensors(3, 5, 4, CPU))

    def fails(run: Callable[[], Tensor]) -> Rerun:
        raise RuntimeError("operation not permitted when stream is capturing")

    lines: list[str] = []
    config = EngineConfig(model="tiny", block_size=4, cuda_graph_sizes=(1,))
    detail = record_graphs(config, model, 4, 64, lines.append, fails)
    assert "not permitted" in detail
    assert model.graphs is None
    assert detail in lines


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 100, 256, 1000])
def test_padding_stays_small(max_num_seqs: int) -> None:
    sizes = default_sizes(max_num_seqs)
    assert sizes[0] == 1
    assert sizes[-1] == min(max_num_seqs, 256)
    for batch in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch <= max(4, 7, batch // 4)


class FakeMemory:
    """A device of 1000 MiB, of which `taken` are in use."""

    def __init__(self, taken: int, peak: int) -> None:
        self.taken, self.peak, self.num_runs = taken, peak, 0

    def free_and_total(self) -> tuple[int, int]:
        return (1000 - self.taken) << 20, 1000 << 20

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        self.num_runs += 1
        return self.peak << 20


def test_the_cache_takes_what_the_largest_step_leaves() -> None:
    memory = FakeMemory(taken=300, peak=50)
    assert kv_budget(memory, 0.9, lambda: None, with_graphs=False) == (900 - 300 - 50 - 256) << 20
    assert kv_budget(memory, 0.9, lambda: None, with_graphs=True) == (900 - 300 - 100 - 256) << 20
    assert kv_budget(FakeMemory(taken=900, peak=50), 0.9, lambda: None, with_graphs=True) == 0


def test_a_profiled_budget_becomes_blocks() -> None:
    config = EngineConfig(model="tiny", block_size=16, gpu_memory_utilization=0.8)
    assert num_kv_blocks(config, 1000, 64, "cpu", profiled=50_500) == 50
    with pytest.raises(NotEnoughMemory, match=r"--gpu-memory-utilization 0.8 leaves"):
        num_kv_blocks(config, 1000, 64, "cpu", profiled=3_999)


def test_the_largest_step_is_run_to_measure_it() -> None:
    """On a CPU nothing asks for it; the step itself is the same anywhere, longer than a sequence may be."""
    module, backend = tiny_model("llama"), triton_backend()
    layout = probe_layout(module, backend)
    largest_step(module, backend, layout, block_size=4, num_tokens=21, max_num_seqs=30, max_model_len=9)
    config = EngineConfig(model="tiny")
    assert profiled_budget(config, module, backend, layout, 64, CPU, FakeMemory(0, 0)) is None
