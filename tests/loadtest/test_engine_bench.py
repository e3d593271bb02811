"""The comparison of engines: what it makes of its measurements."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.engine_bench import CASES, main, table


def test_the_table_gives_ratios_to_the_first_engine_and_shares_of_the_limits() -> None:
    decode, ttft = CASES[0], CASES[4]
    assert (decode.measure, ttft.measure) == ("output", "ttft")
    found = {decode.name: {"ours": 30.0, "peer": 20.0}, ttft.name: {"ours": 50.0, "peer": 100.0}}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(found, {decode.name: 40.0}, [decode, ttft]))
    lines = console.export_text().splitlines()
    (decode_line,) = (line for line in lines if decode.name in line)
    (ttft_line,) = (line for line in lines if ttft.name in line)
    assert "1.50" in decode_line
    assert "75%" in decode_line
    assert "2.00" in ttft_line  # half the time is twice as fast
    assert "%" not in ttft_line


def test_a_case_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ours=http://127.0.0.1:1", "--cases", "sorting"])
    assert "'sorting'" in capsys.readouterr().err


def test_limits_that_cannot_be_measured_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtest.engine_bench.sys.executable", "/bin/false")
    assert main(["ours=http://127.0.0.1:1", "--model-bytes", "1e6"]) == 1
    assert "could not be measured" in capsys.readouterr().err
