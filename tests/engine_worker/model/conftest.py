"""What tests with kernels need: the libraries, compiled before the first test, and one thread unless a test sets more.

Compiling takes as long as the machine is busy, so it isn't done within a test, which has a limit.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine_worker.model.native import INSTRUCTION_SETS, can_be_had


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the collected tests name. Processes that share them begin with different ones."""
    if session.config.option.collectonly:
        return
    calls = [item.callspec for item in session.items if hasattr(item, "callspec")]
    texts = {value for call in calls for value in call.params.values() if isinstance(value, str)}
    names = [name for name in INSTRUCTION_SETS if name in texts]
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        names.reverse()
    for name in names:
        can_be_had(name)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
