"""A worker over HTTP: answers, streams, errors and the routes around them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_worker.serving.fake_engine import make_tokenizer
from tests.engine_worker.serving.running_worker import RunningWorker, chat_body, events, read_to_end, running_worker


def stream(worker: RunningWorker, text: str, **fields: Any) -> tuple[httpx.Response, list[Any]]:
    response = worker.chat(text, stream=True, **fields)
    return response, events(response.text)


def deltas(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


def assert_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


def test_a_chat(worker: RunningWorker) -> None:
    response = worker.chat("hello 😀 日本")
    body = response.json()
    [choice] = body["choices"]
    assert choice["message"]["content"] == "user\nhello 😀 日本\nassistant\n"
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["completion_tokens"] == usage["prompt_tokens"] + 1  # the echo, and the end
    assert usage["prompt_tokens_details"]["cached_tokens"] == int(response.headers["x-warmgate-cached-tokens"])


def test_the_second_time_comes_from_the_cache(worker: RunningWorker) -> None:
    text = "a text of its own for this test, long enough for a few blocks"
    cold, warm = worker.chat(text), worker.chat(text)
    num_prompt = cold.json()["usage"]["prompt_tokens"]
    assert int(cold.headers["x-warmgate-cached-tokens"]) < 16, "what all chats begin with, and no whole block"
    assert int(warm.headers["x-warmgate-cached-tokens"]) == num_prompt - 1
    assert worker.state().num_copied_tokens >= (num_prompt - 1) % 16
    assert warm.json()["choices"] == cold.json()["choices"]


def test_a_salt_of_ones_own_shares_nothing(worker: RunningWorker) -> None:
    text = "another text of its own, for the test about salts in prompts"
    assert worker.chat(text, cache_salt="a").headers["x-warmgate-cached-tokens"] == "0"
    assert worker.chat(text, cache_salt="b").headers["x-warmgate-cached-tokens"] == "0"
    assert worker.chat(text, cache_salt="a").headers["x-warmgate-cached-tokens"] != "0"


def test_a_stream_says_what_the_whole_answer_says(worker: RunningWorker) -> None:
    response, chunks = stream(worker, "hello 😀 日本", stream_options={"include_usage": True})
    whole = worker.chat("hello 😀 日本").json()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-warmgate-cached-tokens"].isdigit()
    assert chunks.pop() == "[DONE]"
    assert deltas(chunks) == whole["choices"][0]["message"]["content"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant", None]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_no_usage_in_a_stream_unless_asked_for(worker: RunningWorker) -> None:
    _, chunks = stream(worker, "hello")
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_several_choices_start_with_the_first(worker: RunningWorker) -> None:
    _, chunks = stream(worker, "hello there", n=3)
    indices = [chunk["choices"][0]["index"] for chunk in chunks[:-1]]
    assert indices[0] == 0
    assert set(indices) == {0, 1, 2}
    assert {deltas(chunks, index) for index in range(3)} == {"user\nhello there\nassistant\n"}
    roles = [
        choice["delta"]["role"] for chunk in chunks[:-1] for choice in chunk["choices"] if "role" in choice["delta"]
    ]
    assert roles == ["assistant"] * 3


def test_a_prompt_counts_once_for_all_its_choices(worker: RunningWorker) -> None:
    one = worker.chat("n of them, and a prompt that is long enough").json()["usage"]
    three = worker.chat("n of them, and a prompt that is long enough", n=3).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    assert three["prompt_tokens_details"]["cached_tokens"] < three["prompt_tokens"]


def test_completions_of_several_prompts(worker: RunningWorker) -> None:
    body = worker.complete(["abc", "hello"], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "abc"), (1, "abc"), (2, "hello"), (3, "hello")
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 4


def test_completions_as_a_stream(worker: RunningWorker) -> None:
    chunks = events(worker.complete("hello 😀", stream=True, max_tokens=3).text)
    assert chunks.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello \ufffd"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_stop_string_ends_the_answer_and_the_work(worker: RunningWorker, streamed: bool) -> None:
    before = worker.ended()
    response = worker.complete("hello world and more", stop=["o w"], stream=streamed, ignore_eos=True)
    if streamed:
        choices = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hell"
    assert choices[-1]["finish_reason"] == "stop"
    worker.until_idle()
    after = worker.ended()
    assert after["stop"] == before.get("stop", 0) + 1
    assert after.get("abort", 0) == before.get("abort", 0)


def test_logprobs_stand_beside_their_text(worker: RunningWorker) -> None:
    _, chunks = stream(worker, "é😀", logprobs=True, top_logprobs=2)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert text.replace("<|start|>", "").replace("<|end|>", "") == deltas(chunks)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_that_fails_has_a_status(worker: RunningWorker, streamed: bool) -> None:
    error = assert_error(worker.chat("[sick]", stream=streamed), 500)
    assert error["message"] == "this request is sick"


def test_a_request_larger_than_the_pool(worker: RunningWorker) -> None:
    with running_worker("--kv-cache-memory", "64") as small:
        small.until_ready()
        error = assert_error(small.complete("x" * 60, max_tokens=50), 400, "context_length_exceeded")
        assert "KV cache" in error["message"]
        assert small.complete("x" * 10, max_tokens=50).status_code == 200


BAD_REQUESTS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no JSON": ({"content": b"{"}, 400, None),
    "a duplicate key": ({"content": b'{"model": "fake", "model": "x", "messages": []}'}, 400, None),
    "deep": ({"content": b'{"a":' * 50_000}, 400, None),
    "an unknown model": ({"json": chat_body("x") | {"model": "gpt"}}, 404, "model_not_found"),
    "a wrong type": ({"json": chat_body("x", temperature="hot")}, 400, None),
    "tools": ({"json": chat_body("x", tools=[{"type": "function"}])}, 400, None),
    "too long": ({"json": chat_body("x" * 5000)}, 400, "context_length_exceeded"),
    "compressed": ({"content": b"x", "headers": {"content-encoding": "gzip"}}, 415, None),
}


@pytest.mark.parametrize(("request_", "status", "code"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_requests(worker: RunningWorker, request_: dict[str, Any], status: int, code: str | None) -> None:
    assert_error(worker.http.post("/v1/chat/completions", **request_), status, code)


def test_a_body_that_is_too_large_is_not_read(worker: RunningWorker) -> None:
    with socket.create_connection(("127.0.0.1", worker.port), timeout=60) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        answer = read_to_end(raw)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_request_ids(worker: RunningWorker) -> None:
    path = "/v1/models"
    assert worker.http.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert worker.http.get(path, headers={"x-request-id": "<script>"}).headers["x-request-id"] != "<script>"
    assert worker.http.get(path).headers["x-request-id"] != worker.http.get(path).headers["x-request-id"]


def test_models(worker: RunningWorker) -> None:
    body = worker.http.get("/v1//models").json()
    assert [card["id"] for card in body["data"]] == ["fake", "org/alias"]
    assert worker.http.get("/v1/models/org/alias").json()["id"] == "org/alias"
    assert_error(worker.http.get("/v1/models/other"), 404, "model_not_found")
    assert worker.chat("x", model="org/alias").json()["model"] == "org/alias"


def test_routes_that_are_not_there(worker: RunningWorker) -> None:
    assert_error(worker.http.get("/v2/models"), 404, "not_found")
    response = worker.http.get("/v1/chat/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "OPTIONS, POST"
    assert_error(worker.http.delete("/v1/models"), 405)
    head = worker.http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert worker.http.options("/v1/completions").status_code == 204


def test_tokenize_and_back(worker: RunningWorker) -> None:
    tokenizer = make_tokenizer()
    body = worker.http.post("/tokenize", json={"model": "fake", "prompt": "hello é", "return_token_strs": True}).json()
    assert body["tokens"] == tokenizer.encode("hello é").ids
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 4096
    back = worker.http.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back == {"prompt": "hello é"}
    chat = worker.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]}).json()
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith("<|start|>assistant\n")
    assert chat["count"] == worker.chat("hello").json()["usage"]["prompt_tokens"]
    assert_error(worker.http.post("/tokenize", json={}), 400)
    assert_error(worker.http.post("/detokenize", json={"tokens": [10**6]}), 400)


def test_state_and_tokenizer(worker: RunningWorker) -> None:
    state = worker.state()
    assert (state.status, state.model, state.block_size, state.num_blocks) == ("ready", "fake", 16, 512)
    assert (state.quantization, state.weight_bytes, state.weight_bytes_saved) == ("none at all", 10, 113)
    assert (state.num_blocks_bought, state.kv_block_bytes_saved) == (7, 3)
    assert state.kv_events_endpoint.startswith("tcp://127.0.0.1:")
    bundle = worker.http.get("/internal/tokenizer").json()
    assert bundle["fingerprint"] == state.tokenizer_fingerprint == "fake"


def test_internal_routes_want_the_secret() -> None:
    with running_worker(env={"WARMGATE_SECRET": "s3cret"}) as worker:
        worker.process.until_http(f"http://127.0.0.1:{worker.port}/health")
        for path in ("/internal/state", "/internal/tokenizer"):
            assert_error(worker.http.get(path), 403)
            assert_error(worker.http.get(path, headers={"x-warmgate-secret": "other"}), 403)
            assert worker.http.get(path, headers={"x-warmgate-secret": "s3cret"}).status_code == 200


def test_while_the_model_loads(tmp_path: Path) -> None:
    gate = tmp_path / "loaded"
    with running_worker("--served-model-name", "fake", model=f"gate:{gate}") as worker:
        state = worker.until_state("loading, with a progress line", detail="loading the fake model")
        assert state.status == "loading"
        assert_error(worker.http.get("/health"), 503, "engine_not_ready")
        response = worker.chat("hello")
        assert_error(response, 503, "engine_not_ready")
        assert int(response.headers["retry-after"]) > 0
        gate.touch()
        worker.until_ready()
        assert worker.http.get("/health").status_code == 200


def test_metrics_have_the_names_that_dashboards_know(worker: RunningWorker) -> None:
    worker.chat("hello")
    text = worker.http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "num_preemptions_total", "request_success_total", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
        "iteration_tokens_total_bucket",
    ):  # fmt: skip
        assert f"\nvllm:{name}{{" in text, name
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="512"' in text


def test_the_api_process_needs_no_torch() -> None:
    check = "import sys, engine_worker.serving.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", check], text=True).strip() == "[]"


def test_told_work_is_a_number_of_seconds(worker: RunningWorker) -> None:
    def asked(value: str) -> httpx.Response:
        return worker.http.post("/v1/chat/completions", json=chat_body("hello"), headers={"x-warmgate-work": value})

    assert asked("0.25").status_code == 200
    for value in ("-1", "nan", "soon", "1e9"):
        assert "x-warmgate-work" in assert_error(asked(value), 400)["message"]
