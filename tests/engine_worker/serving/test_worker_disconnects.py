"""A client that goes away stops its work, whatever phase it is in, and counts as an abort.

The worker runs two sequences at once and 16 tokens a step; a prompt with [slow] takes 20 ms a step. So a long prompt
prefills for seconds, and an echo that ignores the end decodes for many more.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.engine_worker.serving.running_worker import RunningWorker, chat_body, read_until

CHAT = "/v1/chat/completions"
DECODES = chat_body("[slow]", ignore_eos=True, max_tokens=3000)
PREFILLS = chat_body("[slow]" + "x" * 3500, max_tokens=10)


@pytest.fixture
def aborted(worker: RunningWorker) -> Iterator[None]:
    """The test has one client leave: exactly one sequence is aborted, none fails."""
    before = worker.ended()
    yield
    worker.until_idle()
    worker.process.until("the abort is counted", lambda: worker.ended().get("abort", 0) == before.get("abort", 0) + 1)
    assert worker.ended().get("error", 0) == before.get("error", 0)


def leave(sock: socket.socket, reset: bool) -> None:
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()


@pytest.mark.usefixtures("aborted")
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_in_prefill(worker: RunningWorker, stream: bool, reset: bool) -> None:
    sock = worker.connect(CHAT, PREFILLS | {"stream": stream})
    worker.until_state("in prefill", num_running=1, queued_prefill_tokens=lambda tokens: 0 < tokens < 3500)
    leave(sock, reset)
    state = worker.until_state("stopped", num_running=0)
    assert state.num_cached_blocks < 200, "the prompt was computed to its end"


@pytest.mark.usefixtures("aborted")
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_in_decode_of_a_stream(worker: RunningWorker, reset: bool) -> None:
    sock = worker.connect(CHAT, DECODES | {"stream": True})
    read_until(sock, b'"content":"u"')
    leave(sock, reset)


@pytest.mark.usefixtures("aborted")
def test_in_decode_without_streaming(worker: RunningWorker) -> None:
    sock = worker.connect(CHAT, DECODES)
    worker.until_state("in decode", num_running=1, queued_prefill_tokens=0)
    sock.close()


@pytest.mark.usefixtures("aborted")
@pytest.mark.parametrize("stream", [True, False])
def test_in_the_queue(worker: RunningWorker, stream: bool) -> None:
    with ExitStack() as others:
        for _ in range(2):
            others.enter_context(worker.http.stream("POST", CHAT, json=DECODES | {"stream": True, "max_tokens": 80}))
        sock = worker.connect(CHAT, DECODES | {"stream": stream})
        worker.until_state("queued", num_running=2, num_waiting=1)
        sock.close()
        worker.until_state("the queue is empty, the others go on", num_running=2, num_waiting=0)
        worker.until_state("the others are done", num_running=0)


@pytest.mark.usefixtures("aborted")
def test_with_half_the_connection_closed(worker: RunningWorker) -> None:
    """A client that sends no more is taken for one that has gone, as uvicorn sees it."""
    sock = worker.connect(CHAT, DECODES)
    worker.until_state("in decode", num_running=1, queued_prefill_tokens=0)
    sock.shutdown(socket.SHUT_WR)
    worker.until_state("stopped", num_running=0)
    sock.close()


def test_while_the_body_is_read(worker: RunningWorker) -> None:
    before = worker.ended()
    sock = worker.connect(CHAT, DECODES, send_bytes=20)
    sock.close()
    assert worker.chat("hello").status_code == 200
    after = worker.ended()
    assert after.get("abort", 0) == before.get("abort", 0)
    assert after["stop"] == before.get("stop", 0) + 1


def test_all_choices_go_with_their_client(worker: RunningWorker) -> None:
    before = worker.ended().get("abort", 0)
    sock = worker.connect(CHAT, DECODES | {"stream": True, "n": 4})
    read_until(sock, b'"content":"u"')
    sock.close()
    worker.until_idle()
    worker.process.until("four aborts", lambda: worker.ended().get("abort", 0) == before + 4)


def test_a_client_that_stays_is_not_cut_off(worker: RunningWorker) -> None:
    """Next to one that leaves."""
    leaver = worker.connect(CHAT, DECODES | {"stream": True})
    stayer = worker.connect(CHAT, chat_body("[slow] and it stays", stream=True))
    read_until(leaver, b'"content":"u"')
    leaver.close()
    assert b"data: [DONE]" in read_until(stayer, b"data: [DONE]\n\n")
    stayer.close()


def test_a_client_that_reads_late_does_not_hold_up_others(worker: RunningWorker) -> None:
    lazy = worker.connect(CHAT, chat_body("x" * 300, ignore_eos=True, max_tokens=800, stream=True))
    for _ in range(3):
        assert worker.chat("hello").status_code == 200
    assert b"data: [DONE]" in read_until(lazy, b"data: [DONE]\n\n")
    lazy.close()
