"""The measurements of many clients measure at all: small ones of each, and what can't be done is said in a sentence.

Not whether targets are met: a loaded machine's times say nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.streams.cli import main

COMMANDS = {
    "idle": ["idle", "--streams", "40", "--hold", "1"],
    "slow": ["slow", "--readers", "20", "--rounds", "1", "--phase", "1"],
    "memory": ["memory", "--requests", "60", "--clients", "4"],
}


@pytest.mark.e2e
@pytest.mark.parametrize("command", COMMANDS)
def test_each_measures(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    status = main(["--json", str(out), *COMMANDS[command]])
    said = capsys.readouterr()
    assert status in (0, 1), said.err
    found = json.loads(out.read_text())
    match command:
        case "idle":
            assert found["num_streams"] == 40
            assert found["num_beats"] > 0
        case "slow":
            assert found["num_left"] == 20, "a slow reader is no stalled one"
            assert all(first > 0 for first, _ in found["alone_s"] + found["beside_s"])
        case "memory":
            assert found["num_requests"] == 60
            assert found["early_bytes"] > 0


def test_more_streams_than_descriptors_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["idle", "--streams", str(2**40)]) == 2
    assert "ask for at most" in capsys.readouterr().err
