"""The command: run the checks, show a table by category, end with 1 where one failed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.conformance import (  # noqa: F401  # each enters its checks
    bad_input,
    disconnects,
    other_apis,
    sampling,
    sdk,
    shape,
    streams,
    structure,
    surface,
)
from loadtest.conformance.checks import CATEGORIES, CHECKS, Check, Failed, Result, run_all
from loadtest.conformance.target import Target

_MARKS = {"passed": "[green]pass[/]", "failed": "[red]FAIL[/]", "skipped": "[yellow]skip[/]"}


def selected(words: list[str]) -> list[Check]:
    """The checks whose category or claim holds one of the words; all without words."""
    return [
        item
        for category in CATEGORIES
        for item in CHECKS
        if item.category == category
        and (not words or any(word.lower() in f"{item.category}: {item.claim}".lower() for word in words))
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.conformance", description=__doc__)
    parser.add_argument("url", help="any OpenAI-compatible server, with or without /v1")
    parser.add_argument("--model", help="the model to ask for (default: the first that is listed)")
    parser.add_argument("--api-key", default="unused")
    parser.add_argument("--worker", action="append", help="an engine's URL whose /metrics show what it has in hand")
    parser.add_argument("--only", action="append", default=[], help="checks with this in their category or sentence")
    parser.add_argument("--threads", type=int, default=12, help="checks at once (default: 12)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for one answer (default: 60)")
    parser.add_argument(
        "--abort-within-s", type=float, default=0.5, help="for a request whose client left (default: 0.5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--all", action="store_true", help="show checks that passed, too")
    given = parser.parse_args(arguments)
    chosen = selected(given.only)
    for word in given.only:  # each must choose something: a check that didn't run passes for one that did
        if not selected([word]):
            parser.error(
                f"no check has {word!r} in its category or its sentence; the categories are {', '.join(CATEGORIES)}"
            )
    try:
        target = Target(
            given.url, given.model, given.api_key, given.timeout_s, given.abort_within_s, given.worker
        )  # fmt: skip
    except (httpx.HTTPError, Failed, ValueError, KeyError) as error:
        sys.exit(f"{given.url} does not answer as an OpenAI-compatible server: {error}")
    try:
        results = run_all(chosen, target, given.threads)
    finally:
        target.close()
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False))
    else:
        show(results, given.all)
    sys.exit(any(result.outcome == "failed" for result in results))


def show(results: list[Result], with_passed: bool) -> None:
    console = Console()
    details = Table("check", "", "why", title="Checks")
    for result in results:
        if with_passed or result.outcome != "passed":
            details.add_row(
                f"{result.category}: {result.claim}", _MARKS[result.outcome], result.reason, end_section=True
            )
    if details.row_count:
        console.print(details)
    counts = Table("category", "passed", "failed", "skipped", title="Conformance")
    for category in [*CATEGORIES, "all"]:
        found = [result.outcome for result in results if category in (result.category, "all")]
        if found:
            counts.add_row(category, *(str(found.count(outcome)) for outcome in ("passed", "failed", "skipped")))
    console.print(counts)
