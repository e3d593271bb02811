"""Whatever ends a command that starts processes, nothing of it stays: real ones, ended as soon as they have some."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.loadtest.sim.traces import mooncake_rows, write
from tests.support.processes import descendants, process_exists, python

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
]
ENDINGS = [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
COMMANDS: dict[str, tuple[Sequence[str], int]] = {  # and how many processes show that its fleet is there
    "demo": (("loadtest.demo", "--workers", "1"), 3),
    "chaos": (("loadtest.chaos", "--no-redis", "--duration", "600", "--quiet"), 3),
    "streams": (("loadtest.streams", "idle", "--streams", "10", "--hold", "600"), 3),
    "soak": (("loadtest.soak", "--requests", "100000"), 1),
    "validate": (("loadtest.validate", "--workers", "1", "--trace", "TRACE"), 3),
    "fleet": (("loadtest.fleet", "--gateways", "warmgate", "--rate", "0.01", "--replicas", "2", "--trace", "TRACE"), 2),
    "replay": (("loadtest.sim", "--seeds", "500", "--jobs", "2", "--trace", "TRACE"), 3),
}


def command(name: str, folder: Path) -> tuple[list[str], int]:
    trace = str(write(folder / "trace.jsonl", mooncake_rows(400)))
    words, num_processes = COMMANDS[name]
    return [trace if word == "TRACE" else word for word in words], num_processes


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("name", COMMANDS)
def test_its_processes_end_with_it(name: str, how: signal.Signals, tmp_path: Path) -> None:
    words, num_processes = command(name, tmp_path)
    with python("-m", *words) as process:
        process.until("its processes are there", lambda: len(descendants(process.pid)) >= num_processes)
        family = descendants(process.pid)
        process.send(how)
        status = process.until_exit()
        process.until("all are gone", lambda: not any(map(process_exists, family)), alive=False)
        assert status == (-signal.SIGKILL if how is signal.SIGKILL else 130)
        if name != "replay":  # a process of a pool that is still being made says that its pipe has broken
            assert "Traceback" not in process.output
