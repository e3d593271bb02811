"""For all tests: the quick ones run first, so that a broken unit is seen before models load."""

from __future__ import annotations

import os
import signal

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests, then those that need torch, then those that start the whole product; otherwise in their own order."""

    def stage(item: pytest.Item) -> int:
        return 2 if item.get_closest_marker("e2e") else 1 if item.get_closest_marker("engine") else 0

    items.sort(key=stage)
