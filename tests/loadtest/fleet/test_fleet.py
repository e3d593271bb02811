"""A tiny trace, live through our gateway, and what the command makes of it."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from loadtest.fleet import cli, fakes, gateways, runs
from loadtest.fleet.driver import ChatSpeech, Driver
from loadtest.fleet.report import doubts, table
from loadtest.fleet.runs import Row
from loadtest.fleet.text import Wording
from loadtest.sim.job import JobStatus
from loadtest.sim.setup import Load
from tests.loadtest.sim.traces import mooncake_rows, request, session_rows, timed, write

ROW = Row(
    gateway="warmgate", seed=1, hit_ratio=0.5, ttft_mean_s=1.0, ttft_p50_s=1.0, ttft_p90_s=2.0, ttft_p99_s=3.0,
    within_objective=0.9, imbalance=1.1, tpot_mean_s=0.01, num_requests=10, num_failed=0, rate=1.0, duration_s=10.0,
    utilization=0.5, lag={"lag_p99_s": 0.01, "send_lag_p99_s": 0.02}, cpu={"gateway": 0.1, "fakes": 0.2},
)  # fmt: skip


@pytest.mark.e2e
def test_the_command_measures_ours_beside_the_simulation(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", mooncake_rows(40))
    out = tmp_path / "out.json"
    arguments = [
        *("--trace", str(trace), "--gateways", "warmgate,sim:warm", "--replicas", "2", "--blocks", "200"),
        *("--speedup", "30", "--json", str(out)),
    ]
    assert cli.main(arguments) == 0
    ours, simulated = json.loads(out.read_text())
    assert (ours["gateway"], simulated["gateway"]) == ("warmgate", "sim:warm")
    assert ours["num_requests"] == simulated["num_requests"] == 40
    assert ours["num_failed"] == 0
    assert 0.1 < ours["hit_ratio"] < 1.0
    assert ours["hit_ratio"] == pytest.approx(simulated["hit_ratio"], abs=0.3)
    assert ours["lag"]["lag_p99_s"] >= 0.0
    assert ours["compress"] == 16


@pytest.mark.e2e
def test_two_of_ours_share_what_they_know(tmp_path: Path) -> None:
    """Each is sent half of the requests, and hears of the others."""
    trace = write(tmp_path / "t.jsonl", mooncake_rows(40))
    arguments = ["--trace", str(trace), "--replicas", "2", "--blocks", "200", "--speedup", "30"]
    plan = cli.plan_of(cli.parser().parse_args(arguments))
    kind, told = gateways.kind_of("warmgate*2"), []
    with (
        runs.running_fakes(plan, kind.manner) as (upstreams, fakes_pid),
        gateways.running_gateway("warmgate*2", upstreams, runs.MODEL, plan.wording.block_words, tmp_path) as running,
    ):
        row = runs.measure(plan, "warmgate*2", 1, upstreams, fakes_pid, running, None)
        for base_url in running.base_urls:
            told.append(httpx.get(f"{base_url}/health", timeout=30.0).json()["sharing"])
    assert (row.num_requests, row.num_failed) == (40, 0)
    assert [each["num_peers"] for each in told] == [1, 1]
    assert all(each["num_applied"] for each in told), "nothing was heard of the other's requests"


@pytest.mark.e2e
def test_users_go_on_when_they_are_answered(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", session_rows(4))
    arguments = [
        *("--trace", str(trace), "--gateways", "warmgate-text:least_loaded", "--replicas", "2", "--blocks", "200"),
        *("--speedup", "30", "--users", "2", "--ramp", "1"),
    ]
    plan = cli.plan_of(cli.parser().parse_args(arguments))
    row = runs.run(plan, "warmgate-text:least_loaded", seed=3)
    assert row.num_failed == 0
    assert row.num_requests > 4


@pytest.mark.e2e
@pytest.mark.parametrize(("gateway", "is_told"), [("warmgate", True), ("warmgate-text", False)])
def test_our_gateway_tells_bundled_workers_alone_the_work(gateway: str, is_told: bool, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", mooncake_rows(3))
    plan = cli.plan_of(cli.parser().parse_args(["--trace", str(trace), "--replicas", "1", "--blocks", "200"]))
    body = {"model": runs.MODEL, "messages": [{"role": "user", "content": "bab "}], "max_tokens": 1}
    with (
        runs.running_fakes(plan, gateways.kind_of(gateway).manner) as ([upstream], _),
        gateways.running_gateway(gateway, [upstream], runs.MODEL, plan.wording.block_words, tmp_path) as running,
    ):
        for stream in (False, True):
            asked = {**body, "stream": stream}
            httpx.post(f"{running.base_urls[0]}/v1/chat/completions", json=asked, timeout=30.0).raise_for_status()
        stats = httpx.get(f"{upstream.url}/fake/stats").json()
    assert stats["num_with_work"] == (2 if is_told else 0)


def test_the_fleets_process_gets_the_schedulers_limits(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", mooncake_rows(3))
    limits = [*("--token-budget", "2048", "--max-num-seqs", "9"), *("--joint-prefill-tokens", "0")]
    plan = cli.plan_of(cli.parser().parse_args(["--trace", str(trace), "--replicas", "2", *limits]))
    assert plan.setup.fleet.joint_prefill_tokens == 0
    for config in fakes.configs_of(fakes.parser().parse_args(runs.fakes_arguments(plan, "vllm"))):
        assert (config.token_budget, config.max_num_seqs, config.joint_prefill_tokens) == (2048, 9, 0)


async def test_a_gateway_that_is_not_there_fails_every_request_and_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    trace = timed(request(1, 2), request(1, 3))
    driver = Driver((f"http://127.0.0.1:{port}",), "m", trace, Load(), ChatSpeech(Wording(512, 16)), 100.0, 1)
    replayed = await driver.run()
    assert [job.status for job in replayed.jobs] == [JobStatus.FAILED] * 2
    assert all("ClientConnectorError" in job.reason for job in replayed.jobs)


async def test_a_slice_ends_though_nothing_is_under_way_at_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    trace = timed(request(1, 2), request(1, 3, at_s=20.0))
    load = Load(duration_s=1.0)
    driver = Driver((f"http://127.0.0.1:{port}",), "m", trace, load, ChatSpeech(Wording(512, 16)), 100.0, 1)
    async with asyncio.timeout(20):
        replayed = await driver.run()
    assert len(replayed.jobs) == 1


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ("nginx", "unknown gateway 'nginx'"),
        ("warmgate:best", "best"),
        ("sim:best", "best"),
        (" , ", "is empty"),
        ("warmgate*0", "such as warmgate*2"),
        ("warmgate*two", "such as warmgate*2"),
        ("litellm*2", "only ours can be several"),
    ],
)
def test_unknown_names_are_told(names: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", mooncake_rows(3))
    assert cli.main(["--trace", str(trace), "--gateways", names]) == 1
    assert error in capsys.readouterr().err


def test_a_peer_that_is_not_installed_says_how_to(tmp_path: Path) -> None:
    upstreams = [gateways.Upstream("http://127.0.0.1:9", "", "")]
    with (
        pytest.raises(gateways.GatewayFailed, match="pip install sglang-router"),
        gateways.running_gateway("sglang-router", upstreams, "m", 32, tmp_path),
    ):
        pass


def test_how_the_others_are_started(tmp_path: Path) -> None:
    for peer in gateways.PACKAGES:
        (tmp_path / peer / "bin").mkdir(parents=True)
        (tmp_path / peer / "bin" / peer).touch()
    upstreams = [gateways.Upstream(f"http://127.0.0.1:{port}", f"tcp://h:{port}", "tcp://h:7") for port in (1, 2)]
    start = gateways.Start("", upstreams, "m", 32, 9000, 9001, tmp_path, tmp_path)
    command = gateways.KINDS["sglang-router"].command(start)
    assert command[1:5] == ["launch", "--worker-urls", "http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert command[-1] == "cache_aware"
    aware = gateways.KINDS["vllm-router"].command(replace(start, policy="kv_aware"))
    assert "http://127.0.0.1:2=tcp://h:2" in aware
    gateways.KINDS["litellm"].command(start)
    settings = json.loads((tmp_path / "litellm.yaml").read_text())
    assert [each["litellm_params"]["api_base"] for each in settings["model_list"]] == [
        "http://127.0.0.1:1/v1",
        "http://127.0.0.1:2/v1",
    ]


def test_doubts_name_what_spoils_a_run() -> None:
    assert [d for d in doubts([ROW]) if "warmgate" in d] == []
    late = replace(ROW, lag={"lag_p99_s": 0.5, "send_lag_p99_s": 0.0})
    hot = replace(ROW, cpu={"fakes": 0.95})
    failed = replace(ROW, num_failed=2, errors=["500: no"])
    starved = replace(ROW, load_average=1000.0)
    said = "\n".join(doubts([late, hot, failed, starved]))
    for part in ("0.500 s late", "0.95 cores", "500: no", "starved"):
        assert part in said


def test_the_table_has_a_line_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = [ROW, replace(ROW, seed=2, ttft_mean_s=2.0), replace(ROW, gateway="other")]
    Console(width=200).print(table(rows, "made up"))
    shown = capsys.readouterr().out
    assert "1.500 ±0.707" in shown
    assert "other" in shown
    assert "0.10 / 0.20 / 0.00" in shown
