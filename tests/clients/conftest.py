"""A gateway in front of the scripted replica, both as processes of their own. A URL in WARMGATE_TEST_BASE takes the
place of both, for clients that live in an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# What is not installed here is tested in its own environment (`make test-clients`).
collect_ignore = [
    file
    for file, package in {
        "test_anthropic.py": "anthropic",
        "test_langchain.py": "langchain_openai",
        "test_llama_index.py": "llama_index",
        "test_litellm.py": "litellm",
    }.items()
    if importlib.util.find_spec(package) is None
]
BASE_VARIABLE = "WARMGATE_TEST_BASE"
SCRIPTED_VARIABLE = "WARMGATE_TEST_SCRIPTED"


@contextmanager
def running_stack() -> Iterator[tuple[str, str]]:
    """The gateway's address and the scripted replica's."""
    from tests.support.processes import Process, free_port

    replica_port, port = free_port(), free_port()
    replica = f"http://127.0.0.1:{replica_port}"
    with Process([sys.executable, "-m", "tests.clients.scripted", "--port", str(replica_port)]) as scripted:
        scripted.until_http(f"{replica}/v1/models")
        command = [sys.executable, "-m", "gateway.server", "--replica", replica, "--port", str(port)]
        options = ["--model-aliases", "claude-*=scripted,gpt-4o=scripted", "--allowed-origins", "https://app.example"]
        with Process([*command, *options, "--access-log", ""]) as gateway:
            gateway.until_http(f"http://127.0.0.1:{port}/ready")
            yield f"http://127.0.0.1:{port}", replica


@pytest.fixture(scope="session")
def addresses() -> Iterator[tuple[str, str]]:
    if base := os.environ.get(BASE_VARIABLE):
        yield base, os.environ[SCRIPTED_VARIABLE]
        return
    with running_stack() as stack:
        yield stack


@pytest.fixture(scope="session")
def base(addresses: tuple[str, str]) -> str:
    """The gateway's address, without /v1."""
    return addresses[0]


@pytest.fixture(scope="session")
def scripted(addresses: tuple[str, str]) -> str:
    return addresses[1]
