"""For all tests: the quick ones run first, so that a broken unit is seen before models load.

Where several processes share them (`make test`), a file's tests stay together, as do those of a folder that all speak
to the same started servers: what is started, loaded or compiled for one test serves the next.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import hypothesis
import pytest

# Triton decides at its first import whether kernels are compiled or interpreted, and transformers imports it. Tests
# need no GPU: kernels are interpreted, on CPU tensors. Set to 0, tests of kernels are skipped.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup, or as a script's background job, processes that tests start would ignore the signals sent to them.
# A handler of ours is not inherited: processes start with the default, and this one still lives through its terminal.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


# No test asserts a time: on a busy machine an example takes longer than hypothesis's 200 ms, or data are slow to make.
hypothesis.settings.register_profile("warmgate", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("warmgate")


# Servers that one process starts for all tests of a folder.
SHARED = ("tests/clients", "tests/e2e", "tests/fuzz")


def unit_of(nodeid: str) -> str:
    """What one process runs from beginning to end: a file, or one of the folders SHARED."""
    path = nodeid.partition("::")[0]
    return next((folder for folder in SHARED if path.startswith(f"{folder}/")), path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests, then those that need torch, then those that start real processes, of these the whole product last;
    otherwise in their own order."""

    def stage(item: pytest.Item) -> int:
        if unit_of(item.nodeid) == "tests/e2e":  # so that little else runs beside it
            return 3
        return 2 if item.get_closest_marker("e2e") else 1 if item.get_closest_marker("engine") else 0

    items.sort(key=stage)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out one unit after the other, in the order of their first tests."""
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # else those of the most tests come first
    return InOrder(config, log)
