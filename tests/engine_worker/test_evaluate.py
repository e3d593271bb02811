"""The table of formats on a tiny model: every one that a CPU can do, its bounds, and an exit code to go by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_worker.evaluate import BOUNDS, KV_BOUNDS, main, variants
from tests.engine_worker.model.checkpoints import save_checkpoint

pytestmark = pytest.mark.engine

SOME_TEXT = "A text that nobody wrote for this model, which knows nothing and is measured all the same. " * 3


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder: Path = tmp_path_factory.mktemp("evaluated")
    num_threads = torch.get_num_threads()
    save_checkpoint(folder / "model")
    (folder / "text").write_text(SOME_TEXT)
    yield ["--model", str(folder / "model"), "--text", str(folder / "text"), "--device", "cpu", "--max-tokens", "40"]
    torch.set_num_threads(num_threads)


def test_every_format_has_a_line_with_its_bounds(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--max-increase", "9", "--min-agreement", "0"]) == 0
    header, dense, *lines, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["perplexity", "increase", "agreement", "weights", "KV", "a", "token", "took"]
    assert dense.startswith("dense ")
    kinds = [f"{name} weights" for name in BOUNDS if name != "fp8"] + [f"{name} KV" for name in KV_BOUNDS]
    assert [line[:24].strip() for line in lines] == kinds == [variant.name for variant in variants("cpu", False)]
    assert all("(<+900%)" in line and "(>0%)" in line for line in lines)
    assert last == "39 positions; within all bounds"


@pytest.mark.parametrize("bound", [("--max-increase", "-2"), ("--min-agreement", "1.01")], ids=str)
def test_a_bound_that_is_missed_is_said_and_fails(
    arguments: list[str], bound: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--kv-cache-dtype", "int8", *bound]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "39 positions; BEYOND A BOUND"


def test_what_can_not_be_read_is_one_sentence(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for path, why in {
        "/there/is/no/such/text": "There is no file /there/is/no/such/text: give --text one, or leave it out",
        str(tmp_path): f"The text {tmp_path} can't be read (Is a directory): give --text another",
        str(tmp_path / "latin"): f"The text {tmp_path / 'latin'} is not UTF-8: give --text another",
    }.items():
        assert main([*arguments, "--text", path]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"evaluate: {why}")


def test_what_the_device_can_not_do_is_refused_before_anything_is_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--quantization", "fp8"]) == 2
    told = capsys.readouterr()
    assert told.out == "", "not even the table's head"
    assert told.err == "evaluate: Quantization fp8 needs a CUDA device, and this is cpu. Use int8 or int4.\n"
