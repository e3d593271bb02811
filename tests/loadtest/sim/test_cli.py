"""The command from end to end, on tiny traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.sim import compare, search
from loadtest.sim.cli import main
from loadtest.sim.report import Line, gap_closed
from loadtest.sim.trace import FORMATS
from tests.loadtest.sim.traces import mooncake_rows, own_rows, session_rows, write
from tests.support.processes import ROOT

REQUIRED = {
    "policy", "seed", "hit_ratio", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "within_objective",
    "imbalance",
}  # fmt: skip


def test_help_tells_the_formats_by_the_commands_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: warmgate replay ")
    for word in (*FORMATS, "hash_ids", "block_ids", "num_output_tokens"):
        assert word in said.partition("formats of traces:")[2]


def test_the_command(tmp_path: Path) -> None:
    """Several processes, seeds, loads and policies: JSON, table, bounds and pictures."""
    trace, out, plots = write(tmp_path / "m.jsonl", mooncake_rows(40)), tmp_path / "out.json", tmp_path / "plots"
    command = [
        *(sys.executable, "-m", "loadtest.sim", "--trace", str(trace), "--policies", "round_robin,warm,pooled"),
        *("--replicas", "2", "--gpu", "h100", "--blocks", "60", "--rate", "2,4", "--seeds", "2", "--jobs", "2"),
        *("--json", str(out), "--plots", str(plots)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        assert row.keys() >= REQUIRED
        assert row["num_requests"] == 40
        assert row["hit_ratio"] <= row["bound_infinite_hit_ratio"] + 1e-9
        assert row["bound_lru_hit_ratio"] <= row["bound_belady_hit_ratio"] <= row["bound_infinite_hit_ratio"]
    assert [(row["policy"], row["seed"], row["load"]) for row in rows[:2]] == [("pooled", 1, 2.0), ("pooled", 2, 2.0)]
    assert "bounds on the hit ratio" in done.stdout
    order = [done.stdout.index(name) for name in ("round_robin", "warm", "pooled")]
    assert order == sorted(order), "the table keeps the order of --policies"
    pictures = {path.name for path in plots.iterdir()}
    assert {"hit_ratio.png", "ttft_by_load.png", "within_by_load.png", "load_warm_2.png"} <= pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())


def run(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    out = tmp_path / "out.json"
    assert main([*arguments, "--json", str(out), "--jobs", "1"]) == 0
    found: list[dict[str, object]] = json.loads(out.read_text())
    return found


def test_warmgate_replay(tmp_path: Path) -> None:
    """A user's own trace, by the product's command."""
    trace = write(tmp_path / "mine.jsonl", own_rows(20))
    command = [sys.executable, "-m", "gateway.cli", "replay", "--trace", str(trace), "--policies", "warm,round_robin"]
    done = subprocess.run(
        [*command, "--replicas", "2", "--gpu", "l4", "--jobs", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "mine.jsonl, 2 x l4" in done.stdout


def test_a_comparison_over_both_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / compare.SCENARIOS["conversation"].file, mooncake_rows(40))
    write(tmp_path / compare.SCENARIOS["agents"].file, session_rows(10))
    out = tmp_path / "out.json"
    flags = ["--traces", str(tmp_path), "--policies", "least_loaded,pooled", "--seeds", "1", "--jobs", "1"]
    assert compare.main([*flags, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert {(row["scenario"], row["policy"]) for row in rows} == {
        (scenario, policy) for scenario in ("conversation", "agents") for policy in ("least_loaded", "pooled")
    }
    assert "gap closed" in capsys.readouterr().out
    assert compare.main([*flags, "--scenarios", "chess"]) == 1
    assert "unknown scenario 'chess'" in capsys.readouterr().err


def test_users_and_ones_own_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agents = write(tmp_path / "c.jsonl", session_rows(8))
    [row] = run(tmp_path, "--trace", str(agents), "--policies", "warm", "--users", "3", "--replicas", "2")
    assert (row["load_kind"], row["load"]) == ("users", 3)
    own = write(tmp_path / "o.jsonl", own_rows(30))
    [row] = run(tmp_path, "--trace", str(own), "--policies", "warm", "--replicas", "1", "--gpu", "l4")
    assert row["num_requests"] == 30
    assert float(str(row["hit_ratio"])) > 0.5, "the shared 100 tokens"
    assert "own" not in capsys.readouterr().err


def test_load_is_a_share_of_what_least_loaded_serves_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = write(tmp_path / "m.jsonl", mooncake_rows(80))
    flags = ("--trace", str(trace), "--policies", "least_loaded", "--replicas", "2", "--blocks", "60")
    [below] = run(tmp_path, *flags, "--load", "0.97")
    assert float(str(below["within_objective"])) >= search.SHARE
    [above] = run(tmp_path, *flags, "--load", "1.3")
    assert float(str(above["within_objective"])) < search.SHARE
    assert float(str(above["rate"])) == pytest.approx(1.3 / 0.97 * float(str(below["rate"])), rel=0.05)
    said = capsys.readouterr().err
    assert said.count("within the objective") > 3, "searched once ..."
    assert "load 1 is " in said
    assert "no limit" not in said
    monkeypatch.setattr(search, "run_all", None)  # ... and then remembered
    run(tmp_path, *flags, "--load", "0.5")


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_closed_loop_has_users(tmp_path: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "m.jsonl", mooncake_rows(5))
    assert main(["--trace", str(trace), "--policies", "warm", f"--users={number}", "--jobs", "1"]) == 1
    assert f"--users {number}: every number must be more than 0" in capsys.readouterr().err


def test_without_a_load_the_table_is_headed_by_what_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace with times has a pace of its own; sessions without have none, and get a request a second."""
    flags = ("--policies", "warm", "--replicas", "2", "--jobs", "1")
    for rows, heading in ((mooncake_rows(5), "the trace's own pace"), (session_rows(3), "rate 1")):
        assert main(["--trace", str(write(tmp_path / "t.jsonl", rows)), *flags]) == 0
        said = capsys.readouterr().out
        assert f"t.jsonl, 2 x h100, {heading}" in said
        assert "rate 0" not in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--trace", "none.jsonl"), "none.jsonl: No such file"),
        (("--policies", "clairvoyant"), "unknown policy 'clairvoyant': choose one of"),
        (("--gpu", "abacus"), "unknown GPU 'abacus'"),
        (("--blocks", "x"), "--blocks x: numbers separated by commas"),
        (("--gpu", "h100:2,l4:1", "--blocks", "1,2,3"), "one for each kind"),
        (("--blocks", "2"), "too small for this trace"),
        (("--json", "."), "--json . is a folder: name a file in it"),
        (("--rate", "-1"), "--rate -1: every number must be more than 0"),
        (("--rate", "0"), "--rate 0: every number must be more than 0"),
        (("--rate", "1,nan"), "--rate 1,nan: every number must be more than 0"),
        (("--blocks", "0"), "--blocks 0: every number must be more than 0"),
    ],
)
def test_mistakes_get_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "m.jsonl", mooncake_rows(5))
    assert main(["--trace", str(trace), "--policies", "warm", "--rate", "3", "--jobs", "1", *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_a_trace_that_never_fills_the_fleet_has_no_load_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = write(tmp_path / "m.jsonl", mooncake_rows(2))
    for _ in range(2):  # searched, and remembered
        run(tmp_path, "--trace", str(trace), "--policies", "least_loaded", "--load", "0.5")
        said = " ".join(capsys.readouterr().err.split())
        assert "no limit within this trace" in said
        assert "load 1 is" not in said


def test_it_says_what_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "m.jsonl", mooncake_rows(4))
    run(tmp_path, "--trace", str(trace), "--policies", "warm", "--blocks", "60", "--ttft-objective", "0.7")
    said = " ".join(capsys.readouterr().out.split())
    assert "a model like Llama-3-8B in bf16 on one GPU a replica, with 60 KV blocks" in said
    assert "at most 0.7 s later than its cold prefill" in said
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default 8)" in said
    assert "(default h100)" in said
    assert "None" not in said


def test_a_gap_that_is_noise_is_not_closed() -> None:
    def line(ttft_mean_s: float) -> Line:
        runs = SimpleNamespace(ttft_mean_s=ttft_mean_s)
        return Line("p", 1.0, (runs,))  # type: ignore[arg-type]

    assert gap_closed(line(0.99), line(1.0), line(0.985)) is None
    assert gap_closed(line(0.99), line(1.0), line(1.1)) is None
    assert gap_closed(line(0.95), line(1.0), line(0.9)) == pytest.approx(0.5)
