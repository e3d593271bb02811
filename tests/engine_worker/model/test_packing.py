"""Packing: block tables against a plain dict, and a batch against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_worker.core.types import BlockId, Request, SamplingParams, Segment
from engine_worker.model import packing
from engine_worker.model.kv_tensors import KVLayout, KVTensors, LayerShape
from engine_worker.model.packing import BlockTables, pack

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
block_lists = st.lists(st.integers(0, 30), min_size=1, max_size=9)


class TablesAgainstDict(RuleBasedStateMachine):
    """Requests grow, are rewritten (a preemption) and go; the table always says what the dict says."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(2, 2, 4)
        self.model: dict[str, list[int]] = {}
        self.lists: dict[str, list[BlockId]] = {}

    @rule(name=st.sampled_from("abcde"), blocks=block_lists)
    def write(self, name: str, blocks: list[int]) -> None:
        self._update(name, blocks)

    @rule(name=st.sampled_from("abcde"), more=block_lists, follow=st.booleans())
    def grow(self, name: str, more: list[int], follow: bool) -> None:
        known = self.model.get(name, [])
        if follow and known:
            more = [known[-1] + 1 + i for i in range(len(more))]
        self._update(name, known + more)

    @rule(name=st.sampled_from("abcde"))
    def release(self, name: str) -> None:
        self.tables.release(name)
        self.model.pop(name, None)
        self.lists.pop(name, None)

    @rule(name=st.sampled_from("abcde"), blocks=block_lists, anew=st.booleans(), data=st.data())
    def cover(self, name: str, blocks: list[int], anew: bool, data: st.DataObject) -> None:
        """A request's own list, which grows, and is another after a preemption; of its positions more or fewer."""
        if anew or name not in self.lists:
            self.lists[name] = []
        own = self.lists[name]
        own += [BlockId(block) for block in blocks]
        end = data.draw(st.integers(1, 4 * len(own)))
        row = self.tables.cover(name, own, end)
        assert row == self.tables.cover(name, own, end)
        self.model[name] = [int(block) for block in own[: -(-end // 4)]]
        assert row == self.tables._rows[name]

    def _update(self, name: str, blocks: list[int]) -> None:
        given = [BlockId(block) for block in blocks]
        row = self.tables.update(name, given)
        given.append(BlockId(99))  # the caller's list goes on growing
        self.model[name] = blocks
        assert self.tables.table[row, : len(blocks)].tolist() == blocks
        assert self.tables.tensor[row, : len(blocks)].tolist() == blocks

    @invariant()
    def agrees(self) -> None:
        self.tables.check_invariants()
        for name, blocks in self.model.items():
            row = self.tables._rows[name]
            assert self.tables.table[row, : len(blocks)].tolist() == blocks
            assert self.tables.num_blocks[row] == len(blocks)


TestTables = TablesAgainstDict.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def segment(name: str, start: int, ids: tuple[int, ...], blocks: list[int], length: int = 64) -> Segment:
    request = Request(request_id=name, prompt_ids=(0,) * length, params=SamplingParams(max_tokens=1), arrival_s=0.0)
    return Segment(request, start, ids, [BlockId(block) for block in blocks], sample=True)


def test_a_packed_batch_is_what_the_segments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHORT_CONTEXT", 5)
    segments = [
        segment("prefill", 3, (11, 12, 13), [4, 6]),
        segment("scattered", 8, (21,), [7, 2, 5]),
        segment("a run", 9, (31,), [1, 2, 3]),
        segment("first token", 0, (41,), [8]),
    ]
    batch = pack(segments, BlockTables(4, 4, 4), CPU)
    # single tokens first: long runs, then the rest by length; then prefills
    assert batch.input_ids.tolist() == [[31, 41, 21, 11, 12, 13]]
    assert batch.position_ids.tolist() == [[9, 0, 8, 3, 4, 5]]
    assert batch.slots.tolist() == [3 * 4 + 1, 32, 5 * 4, 4 * 4 + 3, 6 * 4, 6 * 4 + 1]
    assert batch.num_decodes == 3
    assert [span.num_tokens for span in batch.spans] == [1, 1, 1, 3]
    assert [(span.start, span.end) for span in batch.spans] == [(9, 10), (0, 1), (8, 9), (3, 6)]
    assert batch.last_index == [5, 2, 0, 1]
    assert batch.block_row(batch.spans[2]).tolist() == [7, 2, 5]


def test_blocks_behind_the_segment_are_not_looked_at() -> None:
    """A table may hold blocks for later positions; contiguity is judged by what the segment reaches."""
    tables = BlockTables(1, 4, 4)
    batch = pack([segment("a", 3, (1,), [4, 9])], tables, CPU)
    assert tables.contiguous[batch.spans[0].row]
    batch = pack([segment("a", 4, (1,), [4, 9])], tables, CPU)
    assert not tables.contiguous[batch.spans[0].row]


def test_a_name_that_comes_back_is_packed_with_the_blocks_it_has_now() -> None:
    """After a preemption, of which the tables may not have heard, and for another request of the same name."""
    tables = BlockTables(2, 4, 4)
    first = segment("a", 0, (1,) * 6, [4, 5])
    assert pack([first], tables, CPU).slots.tolist() == [16, 17, 18, 19, 20, 21]
    resumed = segment("a", 0, (1,) * 6, [7, 2])
    assert pack([resumed], tables, CPU).slots.tolist() == [28, 29, 30, 31, 8, 9]
    tables.release("a")
    other = segment("a", 5, (1,), [9, 3])
    assert pack([segment("b", 0, (1,), [0]), other], tables, CPU).slots.tolist() == [0, 13]
    tables.check_invariants()


def test_cache_shapes_are_known_without_a_forward() -> None:
    layout = KVLayout((LayerShape(2, 8, 8), LayerShape(1, 16, 4)), torch.bfloat16)
    assert layout.block_bytes(16) == 16 * 2 * (2 * 16 + 20)
    kv = KVTensors(2, 3, 16, CPU, layout)
    assert kv.layout() == layout
    keys, values = kv.layer(1)
    assert keys.shape == (48, 1, 16)
    assert values.shape == (48, 1, 4)
    assert keys.dtype == torch.bfloat16
    assert not keys.any()
    assert not values.any()
    kv.check_invariants()
