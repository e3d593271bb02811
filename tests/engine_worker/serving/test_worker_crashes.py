"""An engine that dies, a parent that dies, a worker that is told to stop, a start that can't succeed."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine_worker.serving.running_worker import (
    chat_body,
    events,
    read_to_end,
    read_until,
    running_worker,
)
from tests.support.processes import process_exists, python

CHAT = "/v1/chat/completions"
LONG = chat_body("[slow]", ignore_eos=True, max_tokens=3000)


def streamed_events(data: bytes) -> list[object]:
    """The events in a raw chunked response. No payload here contains a line break."""
    lines = [line for line in data.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: ")]
    return events("".join(line.decode() + "\n\n" for line in lines))


def test_an_engine_killed_under_load() -> None:
    """Streams end with an error event, others with 503; the next engine serves, under another incarnation."""
    with running_worker("--max-num-seqs", "2") as worker:
        before = worker.until_ready()
        stream = worker.connect(CHAT, LONG | {"stream": True})
        read_until(stream, b'"content":"u"')
        answers: list[httpx.Response] = []
        waiters = [threading.Thread(target=lambda: answers.append(worker.http.post(CHAT, json=LONG))) for _ in range(2)]
        for waiter in waiters:
            waiter.start()
        worker.until_state("one waits", num_running=2, num_waiting=1)

        os.kill(worker.engine_pid, signal.SIGKILL)

        chunks = streamed_events(read_until(stream, b"0\r\n\r\n"))
        assert chunks[-1]["error"]["type"] == "server_error"
        assert chunks[-1]["error"]["code"] == "engine_restarting"
        assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
        stream.close()
        for waiter in waiters:
            waiter.join(60)
        assert [answer.status_code for answer in answers] == [503, 503]
        assert all(answer.headers["retry-after"] for answer in answers)

        after = worker.until_state(
            "another engine", status="ready", incarnation=lambda value: value != before.incarnation
        )
        assert after.num_cached_blocks == 0
        assert worker.chat("hello").status_code == 200
        assert worker.ended()["error"] == 3


def test_openais_client_sees_a_broken_stream() -> None:
    """Never an end that looks like a success."""
    with running_worker() as worker:
        worker.until_ready()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{worker.port}/v1", api_key="x", max_retries=0)
        stream = client.chat.completions.create(
            model="fake", messages=LONG["messages"], max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(stream).choices[0].delta.role == "assistant"
        os.kill(worker.engine_pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine process has ended"):
            list(stream)


def test_a_request_that_kills_its_engine() -> None:
    with running_worker() as worker:
        before = worker.until_ready()
        response = worker.chat("[die]", stream=True)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_restarting"
        worker.until_state("another engine", status="ready", incarnation=lambda value: value != before.incarnation)


def test_health_tells_of_an_engine_that_is_stopped_and_goes_on() -> None:
    """The process is there, but does nothing: no request would be answered."""
    with running_worker() as worker:
        worker.until_ready()
        os.kill(worker.engine_pid, signal.SIGSTOP)
        try:
            worker.process.until("an unhealthy worker", lambda: worker.http.get("/health").status_code == 503)
            assert worker.http.get("/health").json()["error"]["code"] == "engine_silent"
        finally:
            os.kill(worker.engine_pid, signal.SIGCONT)
        worker.process.until("a healthy worker", lambda: worker.http.get("/health").status_code == 200)
        assert worker.chat("hello").status_code == 200


def test_while_the_engine_is_down(tmp_path: Path) -> None:
    gate = tmp_path / "loaded"
    gate.touch()
    with running_worker("--served-model-name", "fake", model=f"gate:{gate}") as worker:
        worker.until_ready()
        gate.unlink()
        os.kill(worker.engine_pid, signal.SIGKILL)
        state = worker.until_state("down", status="loading")
        assert state.detail
        response = worker.chat("hello")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert worker.http.get("/health").status_code == 503
        gate.touch()
        worker.until_ready()
        assert worker.chat("hello").status_code == 200


def test_steps_that_raise_fail_their_requests_and_no_more() -> None:
    with running_worker() as worker:
        incarnation = worker.until_ready().incarnation
        assert worker.chat("[boom]").status_code == 500
        assert worker.chat("hello").status_code == 200
        assert worker.chat("[boom]").status_code == 500
        assert worker.chat("hello").status_code == 200
        assert worker.state().incarnation == incarnation
        worker.until_idle()


def test_the_engine_does_not_outlive_its_parent() -> None:
    with running_worker() as worker:
        worker.until_ready()
        engine = worker.engine_pid
        worker.process.send(signal.SIGKILL)
        worker.process.until("the engine is gone", lambda: not process_exists(engine), alive=False)


def test_what_is_between_the_processes_has_no_name_for_others(tmp_path: Path) -> None:
    with running_worker(env={"TMPDIR": str(tmp_path)}) as worker:
        worker.until_ready()
        assert worker.chat("hello").status_code == 200
        assert list(tmp_path.iterdir()) == []


def test_a_stop_lets_requests_finish() -> None:
    with running_worker() as worker:
        worker.until_ready()
        engine = worker.engine_pid
        stream = worker.connect(CHAT, chat_body("[slow] and to its end", stream=True))
        read_until(stream, b'"content":"u"')
        worker.process.send(signal.SIGTERM)
        worker.process.until("health says so", lambda: worker.http.get("/health").status_code == 503)
        assert worker.state().status == "draining"
        refused = worker.chat("hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert streamed_events(read_until(stream, b"0\r\n\r\n"))[-1] == "[DONE]"
        stream.close()
        assert worker.process.until_exit() == 0
        assert not process_exists(engine)


@pytest.mark.parametrize("force", [False, True], ids=["deadline", "second signal"])
def test_a_stop_does_not_wait_for_ever(force: bool) -> None:
    with running_worker("--drain-timeout", "1000" if force else "0.2") as worker:
        worker.until_ready()
        stream = worker.connect(CHAT, LONG | {"stream": True})
        read_until(stream, b'"content":"u"')
        worker.process.send(signal.SIGTERM)
        if force:
            worker.process.until("draining", lambda: worker.http.get("/health").status_code == 503)
            worker.process.send(signal.SIGTERM)
        chunks = streamed_events(read_to_end(stream))
        assert chunks[-1]["error"]["code"] == "shutting_down"
        assert worker.process.until_exit() == 0


def test_a_stop_while_loading(tmp_path: Path) -> None:
    with running_worker(model=f"gate:{tmp_path / 'never'}") as worker:
        worker.until_state("loading", detail="loading the fake model")
        worker.process.send(signal.SIGINT)
        assert worker.process.until_exit() == 0


def test_a_model_that_is_not_there() -> None:
    with running_worker(model="missing") as worker:
        assert worker.process.until_exit() == 1
        assert "There is no model 'missing'; give the folder of one." in worker.process.output
        assert "Traceback" not in worker.process.output


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with python("-m", "engine_worker", "--model", "any", "--port", str(port)) as process:
            assert process.until_exit() == 1
            [line] = process.output.splitlines()
            assert line == (
                f"warmgate worker: can't listen on 127.0.0.1:{port}: Address already in use; "
                "stop what listens there, or choose another --port."
            )
