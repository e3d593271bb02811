"""Weights move onto huge pages where Linux allows it, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_worker.model import huge_pages
from engine_worker.model.huge_pages import use_huge_pages

pytestmark = pytest.mark.engine


def test_each_page_that_holds_a_part_of_a_tensor_is_asked_for_once() -> None:
    whole = torch.zeros(5000, dtype=torch.float32)
    asked: list[tuple[int, int]] = []

    def collapse(address: int, length: int) -> bool:
        asked.append((address, length))
        return len(asked) != 2  # one refusal

    moved = use_huge_pages([whole[10:30], whole, whole[4000:]], collapse, 4096)
    first, last = whole.data_ptr() // 4096, (whole.data_ptr() + 4 * 5000 - 1) // 4096
    assert asked == [(page * 4096, 4096) for page in range(first, last + 1)]
    assert moved == (last - first) * 4096
    assert use_huge_pages([], collapse, 4096) == 0


def test_values_stay_and_what_is_told_is_what_the_kernel_shows() -> None:
    size = huge_pages._page_size()
    if not size:
        pytest.skip("no huge pages here")
    values = torch.arange(4 * size // 8, dtype=torch.int64)
    moved = use_huge_pages([values])
    assert 0 <= moved <= 5 * size
    assert torch.equal(values, torch.arange(4 * size // 8, dtype=torch.int64))
    if moved:
        assert _huge_bytes(values.data_ptr() + values.nbytes // 2) > 0


def _huge_bytes(address: int) -> int:
    """Of the mapping that holds the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


def test_without_huge_pages_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_SIZE", tmp_path / "none")
    assert use_huge_pages([torch.zeros(1 << 20)], lambda address, length: True) == 0
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert use_huge_pages([torch.zeros(1 << 20)], lambda address, length: True) == 0
