"""Several gateway processes behind one port: real processes, a fake worker, Redis."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.observe.merge import Tally, merged
from gateway.processes import share_of
from gateway.server import main
from gateway.siblings import _with_tally
from tests.support.processes import Process, free_ports, python
from tests.support.redis_server import RedisServer

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
# Each request on a connection of its own, so that either process may get it.
HTTP = httpx.Client(timeout=60, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
SECRET = {"x-warmgate-secret": "s3cret"}


def test_several_processes_need_redis(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMGATE_REDIS_URL", raising=False)
    assert main(["--replica", "http://127.0.0.1:1", "--processes", "2", "--port", "0"]) == 2
    assert "set WARMGATE_REDIS_URL" in capsys.readouterr().err


def test_limits_are_divided() -> None:
    assert [share_of(total, 4) for total in (0, 1, 1000, 1001)] == [0, 1, 250, 251]


def exposition(requests: int, in_flight: int, up: int) -> str:
    return (
        "# HELP warmgate_requests_total Ended.\n# TYPE warmgate_requests_total counter\n"
        f'warmgate_requests_total{{model="a=b",status="200"}} {requests}\n'
        "# HELP warmgate_in_flight Now.\n# TYPE warmgate_in_flight gauge\n"
        f"warmgate_in_flight {in_flight}\n"
        "# HELP warmgate_replica_up Up.\n# TYPE warmgate_replica_up gauge\n"
        f'warmgate_replica_up{{replica="r"}} {up}\n'
        "# HELP warmgate_ttft_seconds Time.\n# TYPE warmgate_ttft_seconds histogram\n"
        f'warmgate_ttft_seconds_bucket{{le="1.0"}} {requests}\nwarmgate_ttft_seconds_bucket{{le="+Inf"}} {requests}\n'
        f"warmgate_ttft_seconds_count {requests}\nwarmgate_ttft_seconds_sum {requests / 2}\n"
    )


def value(text: str, sample: str) -> float:
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(sample)))


def test_figures_add_up_or_agree_and_never_fall() -> None:
    tally = Tally()
    text = merged({0: (10, exposition(3, 1, 1)), 1: (11, exposition(4, 2, 1))}, tally)
    assert value(text, 'warmgate_requests_total{model="a=b",status="200"}') == 7
    assert value(text, "warmgate_in_flight") == 3
    assert value(text, 'warmgate_replica_up{replica="r"}') == 1
    assert value(text, 'warmgate_ttft_seconds_bucket{le="+Inf"}') == 7
    assert value(text, "warmgate_ttft_seconds_sum") == 3.5
    silent = merged({0: (10, exposition(5, 1, 1))}, tally)  # the other is dead or doesn't answer
    assert value(silent, "warmgate_requests_total") == 9
    assert value(silent, "warmgate_in_flight") == 1
    again = merged({0: (10, exposition(5, 1, 1)), 1: (12, exposition(1, 0, 1))}, tally)
    assert value(again, "warmgate_requests_total") == 10
    assert value(again, "warmgate_ttft_seconds_count") == 10


def test_a_tally_that_is_cut_off_or_cannot_be_kept_costs_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "tally.json"
    path.write_bytes(b'{"last":{"0":{"pid":1,"cou')
    for where in (path, path, tmp_path / "missing" / "tally.json"):
        text = _with_tally(where, {0: (10, exposition(5, 1, 1))}).decode()
        assert value(text, "warmgate_requests_total") == 5
    assert b'"pid":10' in path.read_bytes()


@contextlib.contextmanager
def two_processes(redis: RedisServer, port: int, worker_port: int, trace: str = "") -> Iterator[Process]:
    env = {
        "WARMGATE_REDIS_URL": redis.url,
        "WARMGATE_REPLICAS": f"http://127.0.0.1:{worker_port}",
        "WARMGATE_PORT": str(port),
        "WARMGATE_PROCESSES": "2",
        "WARMGATE_SECRET": SECRET["x-warmgate-secret"],
        "WARMGATE_ACCESS_LOG": "",
        "WARMGATE_SHADOW_POLICIES": "least_loaded",
        "WARMGATE_RECORD_TRACE": trace,
    }
    with python("-m", "gateway.server", env=env) as process:
        process.until_http(f"http://127.0.0.1:{port}/ready")
        yield process


def chat(port: int) -> httpx.Response:
    return HTTP.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)


def metrics(port: int, own: bool = False) -> httpx.Response:
    url = f"http://127.0.0.1:{port}/metrics" + ("?process=own" if own else "")
    return HTTP.get(url)


def pids(port: int) -> set[int]:
    found = set()
    for _ in range(12):
        with contextlib.suppress(httpx.HTTPError):
            found.add(int(metrics(port, own=True).headers["x-warmgate-pid"]))
    return found


def num_ended(port: int) -> int:
    counts = re.findall(r"^warmgate_requests_total\{.*\} (.*)$", metrics(port).text, re.MULTILINE)
    return round(sum(map(float, counts)))


def test_two_processes_count_drain_restart_and_stop_as_one() -> None:
    port = free_ports(2)
    worker_port = port + 1
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        worker = stack.enter_context(python("-m", "loadtest.fake_worker", "--port", str(worker_port), "--state"))
        worker.until_http(f"http://127.0.0.1:{worker_port}/health")
        gateway = stack.enter_context(two_processes(redis, port, worker_port))
        gateway.until("both serve", lambda: len(pids(port)) == 2)
        gateway.until("both are ready", lambda: all(chat(port).status_code == 200 for _ in range(8)))
        counted = num_ended(port)
        answers = [chat(port) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.headers["x-request-id"] for answer in answers}) == 20
        assert num_ended(port) == counted + 20
        advice = [HTTP.get(f"http://127.0.0.1:{port}/advice").json() for _ in range(6)]
        assert {each["num_processes"] for each in advice} == {2}
        assert all(len(each["sentences"]) == 1 for each in advice), "one for the one policy, and none is silent"

        url = f"http://127.0.0.1:{port}/admin/drain"
        assert HTTP.post(url, headers=SECRET).json()["draining"] is True
        assert {chat(port).status_code for _ in range(12)} == {503}
        assert HTTP.delete(url, headers=SECRET).json()["draining"] is False
        assert {chat(port).status_code for _ in range(12)} == {200}

        replica = f"http://127.0.0.1:{port}/admin/replicas/127.0.0.1:{worker_port}/drain"
        for order in (url, replica):
            assert HTTP.post(order, headers=SECRET).status_code == 200
            killed = min(pids(port))
            os.kill(killed, signal.SIGKILL)
            gateway.until("another takes its place", lambda gone=killed: len(pids(port) - {gone}) == 2)
            assert {chat(port).status_code for _ in range(12)} == {503}, "the new one follows orders, too"
            assert HTTP.delete(order, headers=SECRET).status_code == 200
            gateway.until("they take requests", lambda: all(chat(port).status_code == 200 for _ in range(8)))

        counted = num_ended(port)
        before = pids(port)
        os.kill(min(before), signal.SIGKILL)
        gateway.until("another takes its place", lambda: len(pids(port) - {min(before)}) == 2)
        gateway.until("it is ready", lambda: all(chat(port).status_code == 200 for _ in range(8)))
        assert num_ended(port) >= counted + 8

        gateway.send(signal.SIGTERM)
        assert gateway.until_exit() == 0
        assert not any(map(_is_alive, before))
        began = re.findall(r" INFO warmgate process (\d): gateway on ", gateway.output)
        assert set(began) == {"0", "1"}
        assert len(began) == 5, "two, and three that took a place"
        assert " ERROR warmgate: process " in gateway.output, "what the parent says is of none of them"


def test_both_record_into_one_trace_with_the_same_ids(tmp_path: Path) -> None:
    port, path = free_ports(2), tmp_path / "trace.jsonl"
    long = {"model": "fake", "prompt": "the same words over and over " * 40}
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        worker = stack.enter_context(python("-m", "loadtest.fake_worker", "--port", str(port + 1), "--state"))
        worker.until_http(f"http://127.0.0.1:{port + 1}/health")
        gateway = stack.enter_context(two_processes(redis, port, port + 1, str(path)))
        gateway.until("both serve", lambda: len(pids(port)) == 2)
        gateway.until("both are ready", lambda: all(chat(port).status_code == 200 for _ in range(8)))
        for _ in range(24):
            answer = HTTP.post(f"http://127.0.0.1:{port}/v1/completions", json=long)
            assert answer.status_code == 200
        counts = set()
        for _ in range(12):
            own = metrics(port, own=True).text
            counts.add(
                sum(float(n) for n in re.findall(r'^warmgate_requests_total\{.*"completions".*\} (.*)$', own, re.M))
            )
        gateway.send(signal.SIGTERM)
        assert gateway.until_exit() == 0
    assert min(counts) > 0, "both had some"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    recorded = [row["block_ids"] for row in found if row["block_ids"]]
    assert len(recorded) == 24
    assert len(set(map(tuple, recorded))) == 1


def test_processes_end_with_their_parent() -> None:
    port = free_ports(2)
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        worker = stack.enter_context(python("-m", "loadtest.fake_worker", "--port", str(port + 1), "--state"))
        gateway = stack.enter_context(two_processes(redis, port, port + 1))
        gateway.until("both serve", lambda: len(pids(port)) == 2)
        children = pids(port)
        gateway.send(signal.SIGKILL)
        gateway.until_exit()
        worker.until("they are gone", lambda: not any(map(_is_alive, children)))


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
