"""A gateway's traffic as a trace: what a line says, what it never says, and that `warmgate replay` reads it rightly."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewaySettings
from gateway.observe.trace_file import TraceFile, TraceFileError
from gateway.openai.parse import parse_request
from gateway.server import run
from loadtest.sim.cli import main as replay
from loadtest.sim.trace import read_trace
from policies.types import BlockKey, PrefixChain
from tests.gateway.harness import Replica, gateway, until
from tests.gateway.straight_support import line, request, warmed
from tests.gateway.test_observe import ended_record

BLOCK_CHARS = 128  # of a text-mode block, which stands for 32 tokens
SYSTEM = "".join(f"rule{number:03d} " for number in range(128))  # 8 blocks
PARSED = parse_request("chat", b'{"model":"m","messages":[{"role":"user","content":"x"}]}')


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chain(*keys: int, block_tokens: int = 16) -> PrefixChain:
    return PrefixChain(tuple(map(BlockKey, keys)), block_tokens, len(keys) * block_tokens + 3)


def write(trace: TraceFile, *keys: int, block_tokens: int = 16) -> None:
    record = ended_record(model="m", output_tokens=5)
    trace.write(PARSED, record, chain(*keys, block_tokens=block_tokens))


async def test_traffic_becomes_a_trace_whose_replay_finds_the_shared_prefixes(tmp_path: Path) -> None:
    path, out = tmp_path / "mine.jsonl", tmp_path / "out.json"
    prompts = [SYSTEM + letter * 2 * BLOCK_CHARS for letter in "abca"]
    began = time.time()
    async with gateway(Replica(), Replica(), record_trace=path) as running:
        for prompt in prompts:
            answer = await running.client.post("/v1/completions", json={"model": "fake", "prompt": prompt})
            assert answer.status_code == 200
        await running.client.post("/v1/embeddings", json={"model": "fake", "input": SYSTEM})
        await running.chat(model="nothing")
    found = rows(path)
    assert len(found) == 4
    assert all(began - 1 < row["timestamp"] < time.time() + 1 for row in found)
    assert {row["num_output_tokens"] for row in found} == {8}
    assert {row["block_tokens"] for row in found} == {32}
    assert [len(row["block_ids"]) for row in found] == [10] * 4
    assert found[3]["block_ids"] == found[0]["block_ids"]
    assert found[1]["block_ids"][:8] == found[0]["block_ids"][:8]
    assert not set(found[1]["block_ids"][8:]) & set(found[0]["block_ids"])

    given = ["--trace", str(path), "--policies", "warm", "--replicas", "1", "--rate", "0.1", "--seeds", "1"]
    assert replay([*given, "--jobs", "1", "--json", str(out)]) == 0
    [result] = json.loads(out.read_text())
    num_tokens = sum(row["num_prompt_tokens"] for row in found)
    most = (found[3]["num_prompt_tokens"] - 1) // 32  # a token is left to compute
    assert result["hit_ratio"] == pytest.approx((8 + 8 + min(10, most)) * 32 / num_tokens)


async def test_streams_and_answers_on_the_straight_way_are_recorded_with_their_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    replica = Replica()
    async with warmed(replica, record_trace=path) as (running, ways), line(running) as client:
        assert (await client.ask(request()))[0] == 200
        assert ways.were_straight
        replica.play(first_token_s=0.2)
        sent = time.time()
        await running.chat(True, stream_options={"include_usage": True}, prompt_cache_key="anna@example.com")
        took = time.time() - sent
        assert took >= 0.2
    _, straight, streamed = rows(path)
    assert straight["num_output_tokens"] == streamed["num_output_tokens"] == 8
    assert streamed["timestamp"] < sent + took / 2, "when it came, not when it ended"
    assert "session" not in straight
    assert streamed["session"]
    assert "anna" not in path.read_text()


async def test_the_file_says_nothing_of_prompts_or_their_keys(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.jsonl", 1 << 20)
    write(trace, 2**127 + 12345, 7)
    await trace.close()
    [row] = rows(trace.path)
    assert row.keys() == {
        "timestamp", "num_prompt_tokens", "num_output_tokens", "block_ids", "block_tokens", "model"
    }  # fmt: skip
    assert all(0 <= block < 2**40 for block in row["block_ids"])
    assert not {2**127 + 12345, 12345, 7} & set(row["block_ids"])


async def test_a_file_is_gone_on_with_and_keeps_its_size_of_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for _ in range(2):
        trace = TraceFile(path, 1 << 20)
        write(trace, 1, 2)
        await trace.close()
    other = TraceFile(path, 1 << 20)
    write(other, 1, block_tokens=32)
    write(other, block_tokens=32)  # without blocks the size doesn't matter
    await other.close()
    assert other.num_left_out == 1
    assert [len(row["block_ids"]) for row in rows(path)] == [2, 2, 0]
    trace_read = read_trace(path)
    assert (trace_read.block_tokens, trace_read.num_requests) == (16, 3)


async def test_a_full_file_ends_the_recording_and_says_so_once(tmp_path, caplog) -> None:
    trace = TraceFile(tmp_path / "t.jsonl", 4096)
    for _ in range(40):
        write(trace, 1, 2, 3)
    await until(lambda: not trace.enabled)
    write(trace, 1)
    await trace.close()
    assert trace.path.stat().st_size <= 4096
    found = rows(trace.path)
    assert 0 < len(found) < 40
    assert trace.num_left_out == 40 - len(found)
    assert caplog.text.count("nothing is recorded any more") == 1


@pytest.mark.parametrize("cut", [1, 2, 30])
async def test_a_line_that_a_crash_cut_off_does_not_spoil_the_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.jsonl"
    for _ in range(2):
        trace = TraceFile(path, 1_000_000)
        write(trace, *range(1, 9_000))
        write(trace, *range(1, 9_000))
        await trace.close()
        data = path.read_bytes()
        path.write_bytes(data[:-cut])
    TraceFile(path, 1_000_000)._mend_end()
    assert len(rows(path)) == (4 if cut == 1 else 2), "only the end of the line was missing"
    assert path.read_bytes().endswith(b"\n")
    assert read_trace(path).requests


async def test_a_line_that_a_full_disk_cut_off_is_taken_back(tmp_path, monkeypatch) -> None:
    path = tmp_path / "t.jsonl"
    trace = TraceFile(path, 1_000_000)
    write(trace, 1)
    trace._write_out(trace._entries)
    whole = path.read_bytes()
    left = [len(whole) + 20]

    def full(fd: int, data: Any) -> int:
        size = min(len(data), left[0])
        if not size:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= size
        return os_write(fd, bytes(data[:size]))

    os_write = os.write
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        trace._write_out(trace._entries * 3)
    monkeypatch.undo()
    assert path.read_bytes() == whole * 2
    await trace.close()
    assert path.read_bytes() == whole * 3


async def test_what_can_not_be_written_in_time_is_dropped_and_counted(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("gateway.observe.trace_file._MAX_BLOCKS", 4)
    trace = TraceFile(tmp_path / "t.jsonl", 1 << 20)
    for _ in range(5):
        write(trace, 1, 2)
    await trace.close()
    assert (trace.num_dropped, len(rows(trace.path))) == (3, 2)
    assert "lacks 3 requests" in caplog.text


def test_a_file_that_can_not_be_used_is_said_in_a_sentence_at_the_start(tmp_path: Path, capsys) -> None:
    (tmp_path / "other").write_text("hello\n")
    for path, why in ((tmp_path / "no/t", "can't be opened: No such file"), (tmp_path / "other", "something else")):
        with pytest.raises(TraceFileError, match=why):
            TraceFile(path, 1 << 20)
        assert run(GatewaySettings(replicas=["http://127.0.0.1:1"], port=0, access_log="", record_trace=path)) == 2
        assert why in capsys.readouterr().err


async def test_nobody_is_called_where_nothing_is_recorded() -> None:
    async with gateway(Replica(), record_trace="") as running:
        assert running.app.trace_file is None
        assert running.app._proxy is not None
        assert running.app._proxy.on_served is None
