"""The log line and the metrics: what they say, and that they never say a prompt."""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.observe.access_log import AccessLog
from gateway.observe.metrics import FleetGauges, Metrics
from gateway.observe.record import EndState, RequestRecord
from gateway.relay import finish
from gateway.router import Lease
from tests.gateway.harness import Replica, gateway, until


async def test_a_line_a_request_with_its_facts_and_without_its_prompt(tmp_path):
    path = tmp_path / "access.log"
    replica = Replica()
    async with gateway(replica, access_log=str(path)) as running:
        replica.play(cached_tokens=3)
        prompt = "the secret of the prompt"
        await running.chat(True, messages=[{"role": "user", "content": prompt}], stream_options={"include_usage": True})
        await running.chat(model="nothing")
        await running.client.post("/v1/chat/completions", content=b"{")
        await until(lambda: len(path.read_text().splitlines()) == 3)
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert prompt not in path.read_text()
    expected = {
        "endpoint": "chat", "model": "fake", "stream": True, "status": 200, "end": "completed",
        "replica": replica.name, "policy": "round_robin", "attempts": 1, "prompt_tokens": 10, "cached_tokens": 3,
        "output_tokens": 8, "matched_tokens": 0,
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert 0 < first["ttft_ms"] <= first["total_ms"]
    assert first["request_id"].startswith("req-")
    assert (second["status"], second["end"], second["error"]) == (404, "rejected", "model_not_found")
    assert (third["status"], third["end"], third["model"]) == (400, "rejected", "")


def test_tokenizing_has_no_prompt() -> None:
    """What was placed by an estimate of its tokens isn't counted as a prompt of so many."""

    class AnyLease:
        def finish(self, *counts: object) -> None:
            pass

    for endpoint, counted in (("chat", 7), ("tokenize", None), ("detokenize", None)):
        record = RequestRecord(request_id="r", endpoint=endpoint, started_at=0.0)
        record.prompt_tokens = 7
        finish(record, cast(Lease, AnyLease()), None, 0, 0, None)
        assert record.prompt_tokens == counted


@pytest.mark.parametrize(("said", "counted"), [(10**23, 0), (-5, 0), (500, 10)])
async def test_figures_of_a_replica_that_can_not_be_are_not_added_up(said, counted):
    """On the general way, on the straight one, and in a stream: nobody reuses more than the prompt's ten tokens."""
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(cached_tokens=said)
        for stream in (False, False, True):
            answer = await running.chat(stream, stream_options={"include_usage": True} if stream else None)
            assert answer.status_code == 200
        assert running.events("warmgate_cached_tokens_total") == 3 * counted
        assert running.events("warmgate_requests_total") == 3


async def test_a_log_that_can_not_be_written_drops_lines_and_counts_them(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.observe.access_log._MAX_LINES", 2)
    log = AccessLog(str(tmp_path / "x.log"))
    for _ in range(5):
        log.write(ended_record())
    await log.close()
    assert log.num_dropped == 3
    assert len((tmp_path / "x.log").read_text().splitlines()) == 2


def test_a_request_ends_once():
    record = ended_record()
    with pytest.raises(AssertionError):
        record.end_as(EndState.FAILED)


def ended_record(**fields) -> RequestRecord:
    record = RequestRecord(request_id="r", endpoint="chat", started_at=time.monotonic(), **fields)
    record.status = 200
    record.ended_at = record.started_at + 1.0
    record.end_as(EndState.COMPLETED)
    return record


def test_metrics_of_an_ended_request():
    metrics = Metrics(FleetGauges)
    times = {"placed_at": time.monotonic(), "first_token_at": time.monotonic()}
    metrics.ended(ended_record(model="m", matched_tokens=4, cached_tokens=3, prompt_tokens=9, output_tokens=2, **times))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert values["warmgate_requests_total"] == 1
    assert values["warmgate_matched_tokens_total"] == 4
    assert values["warmgate_cached_tokens_total"] == 3
    assert values["warmgate_ttft_seconds_count"] == 1
    assert all(name.startswith("warmgate_") for name in families)


async def test_gauges_are_the_fleets_state_at_the_scrape():
    replica = Replica()
    async with gateway(replica) as running:
        replica.play(fault="stall")
        request = running.client.build_request(
            "POST", "/v1/chat/completions", json={"model": "fake", "stream": True, "messages": [{"content": "x"}]}
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(running.client.send(request))
            await until(lambda: running.events("warmgate_replica_waiting") == 1)
            assert running.events("warmgate_in_flight") == 1
            assert running.events("warmgate_replica_up") == 1
            task.cancel()
        await until(lambda: running.events("warmgate_in_flight") == 0)
