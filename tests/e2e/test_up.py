"""`warmgate up` itself, with real workers where it is about them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from tests.e2e.conftest import LOAD_LIMIT_S
from tests.support.processes import Process, descendants, free_port, free_ports, process_exists

pytestmark = pytest.mark.e2e


def command(*more: str) -> list[str]:
    ports = ("--port", str(free_port()), "--worker-port", str(free_ports(1)))
    return [sys.executable, "-m", "gateway.cli", "up", "--workers", "1", *ports, *more]


def test_too_little_memory_is_a_sentence_and_ends_it() -> None:
    done = subprocess.run([*command(), "--kv-cache-memory", "1"], capture_output=True, text=True, timeout=LOAD_LIMIT_S)
    assert done.returncode != 0
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert "memory" in last.lower()
    assert "Traceback" not in last


def test_a_folder_that_is_no_model_ends_it_with_the_workers_words(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run([*command("--model", str(tmp_path))], capture_output=True, text=True, timeout=LOAD_LIMIT_S)
    assert done.returncode != 0
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert last.startswith("worker-1")
    assert str(tmp_path) in last or "config" in last


def test_a_port_in_use_ends_it_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "up", "--port", port], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert port in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_behind(how: signal.Signals) -> None:
    """After Ctrl-C while all is well, and after the supervisor was killed: no process of it is left."""
    with Process(command()) as up:
        up.until_output("Warmgate is ready", LOAD_LIMIT_S)
        family = descendants(up.pid)
        assert len(family) >= 3  # gateway, worker, its engine
        up.send(how)
        up.until("all are gone", lambda: not any(map(process_exists, family)), alive=False)
        assert up.until_exit() == (0 if how is signal.SIGINT else -signal.SIGKILL)
