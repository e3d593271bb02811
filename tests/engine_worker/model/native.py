"""Kernel libraries for tests: one for each instruction set that this machine can run."""

from __future__ import annotations

from functools import cache

import pytest

from engine_worker.model.native import build
from engine_worker.model.native.library import Library

AUTO = "auto"  # what a worker loads by default
BUILD_LIMIT_S = 3600.0  # a build takes a quarter of a minute of a core of its own, and a busy machine has none


@cache
def _load(name: str) -> Library | str:
    try:
        isa = build.choose(name)
        return Library(str(build.find_or_build(isa, lambda message: None, limit_s=BUILD_LIMIT_S)), isa.name)
    except build.NativeUnavailable as error:
        return str(error)


def library_for(name: str) -> Library:
    """The library built for avx512, avx2 or generic. Skips the test where the processor or the compiler is missing;
    kernels that a compiler refuses, or never ends with, fail it."""
    found = _load(name)
    if isinstance(found, str):
        assert "could not compile" not in found, found
        assert "took more than" not in found, found
        pytest.skip(found)
    return found


def can_be_had(name: str) -> bool:
    return isinstance(_load(name), Library)


INSTRUCTION_SETS = ("avx512", "avx2", "generic")


def available_libraries() -> list[Library]:
    """All that can be had here."""
    return [found for name in INSTRUCTION_SETS if isinstance(found := _load(name), Library)]
