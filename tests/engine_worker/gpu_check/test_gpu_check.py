"""The check of a GPU, tried on a CPU in miniature, so that it is known to run before it meets a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.engine


def test_the_check_runs_in_miniature(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = tmp_path / "found.json"
    options = ["--device", "cpu", "--tiny", "--json", str(found), "--only", "device,dense"]
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu_check", *options],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    rows = json.loads(found.read_text())
    names = {row["name"] for row in rows}
    stopped = [row for row in rows if row["ok"] is False and str(row["value"]).startswith("stopped after")]
    assert [row for row in rows if row["ok"] is False and row not in stopped] == [], done.stdout
    assert done.returncode == (1 if stopped else 0)
    if not stopped:  # a machine under load may outlive a section's time
        assert {"torch", "decode, 2 at once", "TTFT, 48 tokens, warm"} <= names


@pytest.mark.parametrize("names", ["nosuch", "device,nosuch", ","])
def test_a_section_that_is_not_there_is_an_error_that_lists_them(
    names: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_worker.gpu_check.__main__ import main

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--device", "cpu", "--tiny", "--only", names]) == 2
    said = capsys.readouterr()
    assert "choose among device, dense, kernels" in said.err
    assert "rows" not in said.out


def test_sections_fail_alone(tmp_path: Path) -> None:
    from engine_worker.gpu_check.report import Report

    report = Report(json_path=tmp_path / "rows.json")

    def fails() -> None:
        report.add("before", 1.0)
        raise ValueError("a reason")

    def hangs() -> None:
        report.add("found before its time was up", 1.0, ok=True)
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # code that goes on after errors can't outlive its time either
                continue

    report.run("first", 30, fails)
    report.run("second", 0.05, hangs)
    report.run("third", 30, lambda: report.add("after", 2.0, ok=True))
    assert [(row.section, row.ok) for row in report.rows] == [
        ("first", None),
        ("first", False),
        ("second", True),
        ("second", False),
        ("third", True),
    ]
    assert "a reason" in str(report.failed[0].value)
    assert str(report.failed[1].value).startswith("stopped after")
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 5


def test_without_a_device_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    from engine_worker.gpu_check.__main__ import main

    assert main(["--device", "cuda"]) == 2


def test_on_a_cpu_it_asks_for_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_worker.gpu_check.__main__ import main

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["--device", "cpu", "--tiny"]) == 2
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err
