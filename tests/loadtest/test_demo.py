"""The demo's workload and its arithmetic; the runs themselves are real ones, elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from loadtest import demo, warm_prefix
from loadtest.client import chat
from loadtest.conversations import Shape, play, write_script
from loadtest.records import Record, percentile, summarize

SHAPE = Shape(num_conversations=5, num_turns=3, system_words=60, document_words=20, question_words=5, concurrency=3)


def record(**changes: object) -> Record:
    base = {
        "conversation": 0,
        "turn": 0,
        "started_at": 10.0,
        "first_token_at": 10.5,
        "finished_at": 11.0,
        "status": 200,
    }
    return Record(**{**base, **changes})  # type: ignore[arg-type]


def test_the_same_seed_writes_the_same_script_and_another_seed_another() -> None:
    assert write_script(SHAPE) == write_script(SHAPE)
    assert write_script(SHAPE) != write_script(Shape(**{**_fields(SHAPE), "seed": 8}))


def test_everyone_has_every_turn_and_the_order_is_interleaved() -> None:
    script = write_script(SHAPE)
    assert Counter(script.order) == dict.fromkeys(range(SHAPE.num_conversations), SHAPE.num_turns)
    rounds = [script.order[i : i + 5] for i in range(0, len(script.order), 5)]
    assert all(sorted(each) == list(range(5)) for each in rounds)
    assert len(set(rounds)) > 1, "the same order each round would tie conversations to replicas under round_robin"


async def test_each_turn_carries_the_whole_history_and_at_most_concurrency_run_at_once() -> None:
    script, running, peak = write_script(SHAPE), 0, 0
    prompts: dict[tuple[int, int], list[dict[str, str]]] = {}

    async def ask(messages: list[dict[str, str]], conversation: int, turn: int) -> Record:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        prompts[conversation, turn] = list(messages)
        await asyncio.sleep(0)
        running -= 1
        return record(conversation=conversation, turn=turn, text=f"answer {conversation}.{turn}")

    records = await play(script, SHAPE, ask, lambda _: None)
    assert len(records) == 15
    assert peak == SHAPE.concurrency
    for conversation in range(5):
        last = prompts[conversation, 2]
        assert [m["role"] for m in last] == ["system", "user", "assistant", "user", "assistant", "user"]
        assert last[:4] == prompts[conversation, 1]
        assert last[2]["content"] == f"answer {conversation}.0"
        assert last[0]["content"] == script.system


async def test_a_failed_turn_ends_its_conversation_only() -> None:
    async def ask(messages: list[dict[str, str]], conversation: int, turn: int) -> Record:
        return record(conversation=conversation, turn=turn, error="no" if conversation == 2 else "")

    records = await play(write_script(SHAPE), SHAPE, ask, lambda _: None)
    assert Counter(r.conversation for r in records) == {0: 3, 1: 3, 2: 1, 3: 3, 4: 3}


def test_the_options_default_to_the_shape() -> None:
    options = demo._parser().parse_args([])
    assert (options.conversations, options.turns, options.seed) == (8, 4, Shape().seed)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(1, 21)]
    assert [percentile(values, share) for share in (0.5, 0.95, 1.0)] == [10, 19, 20]
    assert percentile([3.0], 0.5) == 3


def test_a_summary_counts_tokens_and_leaves_failures_out_of_the_times() -> None:
    records = [
        record(replica="a", prompt_tokens=100, cached_tokens=0),
        record(replica="b", prompt_tokens=300, cached_tokens=200, matched_tokens=240, first_token_at=10.1),
        record(error="broke", first_token_at=None, prompt_tokens=0, finished_at=30.0),
    ]
    summary = summarize(records)
    assert summary.cached_share == 0.5
    assert summary.matched_share == 0.6
    assert summary.num_errors == 1
    assert summary.ttft_p95_s == 0.5
    assert summary.requests_per_replica == {"a": 1, "b": 1}
    assert summary.duration_s == 20


def test_the_tables_render(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    slow = summarize([record(replica="a", prompt_tokens=100, cached_tokens=20)])
    fast = summarize([record(replica="a", prompt_tokens=100, cached_tokens=80, first_token_at=10.1)])
    console = Console(width=120)
    console.print(demo.table(slow, fast, num_workers=2))
    console.print(warm_prefix.table([(record(), record(first_token_at=10.1, cached_tokens=900))]))
    shown = capsys.readouterr().out
    assert "500 ms" in shown
    assert "5.00x" in shown
    assert "4.00x" in shown
    assert "5.0x" in shown
    assert "1 / 0" in shown


@pytest.mark.parametrize(
    ("lines", "error", "text"),
    [
        (
            ['{"choices":[{"delta":{"role":"assistant"}}]}', '{"choices":[{"delta":{"content":"hi"}}]}', "[DONE]"],
            "",
            "hi",
        ),
        (['{"choices":[{"delta":{"content":"hi"}}]}'], "the stream ended without [DONE]", "hi"),
        (['{"error":{"message":"worker died"}}'], "worker died", ""),
    ],
)
async def test_the_client_records_how_a_stream_ended(lines: list[str], error: str, text: str) -> None:
    body = "".join(f"data: {line}\n\n" for line in lines).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert request["stream"]
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("x-warmgate-replica", "r1")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
            got = await chat(client, "m", [{"role": "user", "content": "x"}], 4)
    finally:
        server.shutdown()
        server.server_close()
    assert got.error == error
    assert got.replica == "r1"
    if not got.error:
        assert got.text == text
        assert got.ttft_s is not None


async def test_a_refused_connection_is_a_record_too() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as client:
        got = await chat(client, "m", [{"role": "user", "content": "x"}], 4)
    assert got.error.startswith("ConnectError")
    assert got.status == 0


def _fields(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}
