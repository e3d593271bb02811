"""A short run of everything at once: two gateways, three workers, Redis, a thousand requests or so.

Correctness only: how fast a loaded machine notices is judged by eye, from the table that is printed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.chaos.cli import main
from loadtest.chaos.verdict import Ending

SEED = 198  # of those that kill, stop, cut and flush within its seconds


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_token_is_lost_doubled_or_reordered_while_everything_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "chaos.json"
    flags = ["--seed", str(SEED), "--duration", "18", "--every", "2", "--keep", str(tmp_path / "logs")]
    status = main([*flags, "--json", str(out)])
    said = capsys.readouterr()
    print(said.out, said.err)
    assert status == 0, said.err
    found = json.loads(out.read_text())
    assert found["endings"][Ending.COMPLETED] > 0.5 * found["num_asks"]
    assert {harm["kind"] for harm in found["harms"]} >= {"kill_worker", "kill_gateway", "harm_link"}
