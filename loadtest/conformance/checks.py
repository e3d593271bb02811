"""The list that checks are written into, and what they say when they don't hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import httpx

if TYPE_CHECKING:
    from loadtest.conformance.target import Target

Category = Literal["shape", "streams", "sampling", "structure and tools", "bad input", "surface", "sdk", "disconnects"]
CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]

_MAX_REASON = 300


class Failed(Exception):
    """The server did something else than it should."""


class Skipped(Exception):
    """The check can't be judged here."""


@dataclass(frozen=True, slots=True)
class Check:
    """`alone`: it looks at what the server has in hand, so nothing else may run meanwhile."""

    category: Category
    claim: str
    run: Callable[[Target], None]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    category: Category
    claim: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str = ""
    seconds: float = 0.0


CHECKS: list[Check] = []


def check(
    category: Category, claim: str, *, alone: bool = False
) -> Callable[[Callable[[Target], None]], Callable[[Target], None]]:
    """Enter a function into the list under the sentence that it judges."""

    def enter(function: Callable[[Target], None]) -> Callable[[Target], None]:
        add(category, claim, function, alone=alone)
        return function

    return enter


def add(category: Category, claim: str, function: Callable[[Target], None], *, alone: bool = False) -> None:
    assert all(known.claim != claim or known.category != category for known in CHECKS), f"twice: {claim}"
    CHECKS.append(Check(category, claim, function, alone))


def expect(condition: object, message: str) -> None:
    if not condition:
        raise Failed(message)


def same(actual: Any, expected: Any, what: str) -> None:
    if actual != expected:
        raise Failed(f"{what} is {actual!r:.120}, not {expected!r:.120}")


def run_check(item: Check, target: Target) -> Result:
    begun = time.monotonic()

    def result(outcome: Literal["passed", "failed", "skipped"], reason: object = "") -> Result:
        return Result(item.category, item.claim, outcome, str(reason)[:_MAX_REASON], time.monotonic() - begun)

    try:
        item.run(target)
    except Failed as error:
        return result("failed", error)
    except Skipped as error:
        return result("skipped", error)
    except httpx.HTTPError as error:
        return result("failed", f"{type(error).__name__}: {error}")
    except Exception as error:  # what a client written against the specification would trip over in the same way
        return result("failed", f"the answer broke the reader: {type(error).__name__}: {error}")
    return result("passed")


def run_all(checks: Sequence[Check], target: Target, num_threads: int) -> list[Result]:
    """Results in the order of `checks`."""
    results: dict[int, Result] = {}
    together = [(i, item) for i, item in enumerate(checks) if not item.alone]
    with ThreadPoolExecutor(num_threads) as pool:
        done = pool.map(lambda entry: (entry[0], run_check(entry[1], target)), together)
        results.update(done)
    for i, item in enumerate(checks):
        if item.alone:
            results[i] = run_check(item, target)
    return [results[i] for i in range(len(checks))]
