"""Clients that leave, workers that die or freeze. Every request ends in exactly one way, and the fleet mends itself."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.e2e.conftest import LOAD_LIMIT_S, Stack
from tests.support.processes import descendants, free_port, python

pytestmark = pytest.mark.e2e

COUNT = [{"role": "user", "content": "Count from one to a thousand, in words."}]


def endless(client: openai.OpenAI, stack: Stack, **more: object):
    """A stream that runs for thousands of tokens unless someone stops it."""
    return client.chat.completions.with_raw_response.create(
        model=stack.model, messages=COUNT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}, **more
    )


def aborts(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    found = re.findall(r'^vllm:request_success_total{[^}]*finished_reason="abort"[^}]*} (\S+)$', text, re.M)
    return sum(map(float, found))


def test_a_disconnect_in_mid_stream_frees_the_worker(client: openai.OpenAI, stack: Stack) -> None:
    stack.until_idle()
    raw = endless(client, stack)
    worker = stack.worker_index(raw.headers["x-warmgate-replica"])
    before = aborts(stack.worker_urls[worker])
    stream = raw.parse()
    for _ in range(3):
        next(iter(stream))
    assert stack.worker_state(worker)["num_running"] == 1
    stream.close()
    stack.until_idle()
    stack.up.until("the worker counts an abort", lambda: aborts(stack.worker_urls[worker]) == before + 1)
    state = stack.worker_state(worker)
    assert state["num_free_blocks"] == state["num_blocks"]
    stack.up.until("the gateway's slot is free", lambda: "\nwarmgate_in_flight 0.0\n" in stack.metrics())


def test_a_disconnect_without_streaming_frees_the_worker_too(client: openai.OpenAI, stack: Stack) -> None:
    stack.until_idle()
    body = {"model": stack.model, "messages": COUNT, "max_tokens": 4000, "ignore_eos": True}
    before = sum(map(aborts, stack.worker_urls))
    impatient = httpx.Timeout(120, read=2.0)
    with httpx.Client(timeout=impatient, trust_env=False) as http, pytest.raises(httpx.ReadTimeout):
        http.post(f"{stack.base_url}/v1/chat/completions", json=body)
    stack.until_idle()
    stack.up.until("a worker counts an abort", lambda: sum(map(aborts, stack.worker_urls)) == before + 1)


@dataclass
class Ending:
    """How one request ended: `finish_reasons` and whether an exception came, and from which replica."""

    replica: str
    finish_reasons: list[str]
    error: str

    @property
    def kind(self) -> str:
        if self.error:
            return "error" if not self.finish_reasons else "both"
        return "finished" if len(self.finish_reasons) == 1 else "silent"


def one_request(stack: Stack, number: int, started: threading.Semaphore) -> Ending:
    ending = Ending("", [], "")
    try:
        with stack.client() as client:
            raw = client.chat.completions.with_raw_response.create(
                model=stack.model,
                messages=[{"role": "user", "content": f"{number}. Write a long story about the number {number}."}],
                max_tokens=120,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            ending.replica = raw.headers["x-warmgate-replica"]
            for chunk in raw.parse():
                started.release()
                ending.finish_reasons += [c.finish_reason for c in chunk.choices if c.finish_reason]
    except openai.APIError as error:
        ending.error = f"{type(error).__name__}: {error}"
    return ending


def test_a_worker_killed_under_load(client: openai.OpenAI, stack: Stack) -> None:
    """Streams cut off end in an error, others finish; new requests are answered; the worker comes back by itself."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(one_request, stack, number, started) for number in range(8)]
        for _ in range(40):
            assert started.acquire(timeout=120)
        busy = [worker for worker in (0, 1) if stack.worker_state(worker)["num_running"]]
        victim = busy[0]
        incarnation = stack.worker_state(victim)["incarnation"]
        os.kill(stack.worker_pid(victim), signal.SIGKILL)
        survivors = [
            client.chat.completions.with_raw_response.create(
                model=stack.model, messages=[{"role": "user", "content": f"Hello {i}"}], max_tokens=2
            )
            for i in range(4)
        ]
        endings = [future.result(300) for future in running]
    dead, alive = stack.replica_name(victim), stack.replica_name(1 - victim)
    assert [raw.headers["x-warmgate-replica"] for raw in survivors] == [alive] * 4
    kinds = Counter(ending.kind for ending in endings)
    assert set(kinds) <= {"finished", "error"}, endings
    assert kinds["error"] > 0, "nothing was running on the killed worker"
    assert all(ending.replica == dead for ending in endings if ending.error), endings
    assert all(ending.kind == "finished" for ending in endings if ending.replica == alive), endings
    stack.up.until("the worker is back", lambda: stack.is_up(victim), LOAD_LIMIT_S)
    assert stack.worker_state(victim)["incarnation"] != incarnation
    assert_serves(client, stack, victim)


def test_a_killed_engine_process_is_started_again(client: openai.OpenAI, stack: Stack) -> None:
    """The engine dies, its API process lives: it says so, and has another engine before long."""
    incarnation = stack.worker_state(0)["incarnation"]
    engines = descendants(stack.worker_pid(0))
    assert engines
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    stack.up.until(
        "the worker has another engine",
        lambda: stack.worker_state(0)["incarnation"] != incarnation and stack.worker_state(0)["status"] == "ready",
        LOAD_LIMIT_S,
    )
    stack.until_all_up()
    assert_serves(client, stack, 0)


def test_requests_waiting_at_a_stopped_worker_fail_over(client: openai.OpenAI, stack: Stack, long_prompt: str) -> None:
    """SIGSTOP: connections stay open and nothing answers. What waits for its first token there goes elsewhere."""
    messages = [{"role": "user", "content": long_prompt}]

    def ask() -> str:
        raw = client.chat.completions.with_raw_response.create(model=stack.model, messages=messages, max_tokens=2)
        return raw.headers["x-warmgate-replica"]

    home = ask()
    assert ask() == home
    frozen = stack.worker_index(home)
    leader = stack.worker_pid(frozen)
    family = [leader, *descendants(leader)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert ask() == stack.replica_name(1 - frozen)
        stack.up.until("the frozen worker gets no new requests", lambda: not stack.is_up(frozen))
        assert ask() == stack.replica_name(1 - frozen)
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)
    stack.until_all_up()
    stack.until_idle()
    assert_serves(client, stack, frozen)


def test_with_no_replica_left_the_client_hears_503_and_when_to_come_back() -> None:
    port = free_port()
    with python("-m", "gateway.cli", "serve", "--replica", "http://127.0.0.1:9", "--port", str(port)) as gateway:
        gateway.until("the gateway listens", lambda: httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0, timeout=60)
        with client, pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="any", messages=COUNT)
        assert caught.value.status_code == 503
        assert float(caught.value.response.headers["retry-after"]) > 0
        assert caught.value.type == "server_error"


def assert_serves(client: openai.OpenAI, stack: Stack, worker: int) -> None:
    """Under load this worker takes its part again. (One request at a time may all go where a common head is cached.)"""

    def ask(number: int) -> str:
        raw = client.chat.completions.with_raw_response.create(
            model=stack.model,
            messages=[{"role": "user", "content": f"{os.urandom(64).hex()} {number}"}],
            max_tokens=4,
        )
        return raw.headers["x-warmgate-replica"]

    with ThreadPoolExecutor(8) as pool:
        replicas = Counter(pool.map(ask, range(16)))
    assert replicas[stack.replica_name(worker)] > 0, replicas
