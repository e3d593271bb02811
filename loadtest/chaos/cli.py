"""`python -m loadtest.chaos`: everything fails on a seeded schedule, and every token is checked.

    python -m loadtest.chaos --seed 7 --requests 1000 --every 2
    python -m loadtest.chaos --duration 600 --every 10 --clients 48 --json chaos.json
    python -m loadtest.chaos --workers engine --duration 120

Two gateways, three workers behind links that can be spoilt, a Redis; all of them are killed, stopped and started again
while clients of many habits ask. The exit status is 0 when every row about correctness holds; rows about times and
rates are printed beside their targets, and decide only with --strict. A run is had again with its --seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.chaos.engines import TINY
from loadtest.chaos.processes import NotStarted
from loadtest.chaos.run import Options, Result, run
from loadtest.ending import interrupted_by_signals
from loadtest.options import Parser, above_zero, count, from_zero

DEFAULT_REQUESTS = 1000
_MAX_SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """0: correct (with --strict: and within all targets). 1: not, with the faults on stderr. 2: it could not be run."""
    given = parser().parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10_000)
    num_requests = given.requests
    if num_requests is None and given.duration is None:
        num_requests = DEFAULT_REQUESTS
    options = Options(
        seed=seed,
        num_requests=num_requests,
        duration_s=given.duration,
        every_s=given.every,
        num_clients=given.clients,
        workers=given.workers,
        model=given.model,
        token_s=given.token_s,
        with_redis=not given.no_redis,
        calm=given.calm,
        folder=given.keep,
    )
    interrupted_by_signals()
    tell = _quiet if given.quiet else _to_stderr
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(run(options, tell))
    except NotStarted as problem:
        print(f"chaos: {problem}", file=sys.stderr)
        return 2
    except ExceptionGroup as group:
        if (problems := group.subgroup(NotStarted)) is None:
            raise
        print(f"chaos: {_first(problems)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if given.json:
        given.json.write_text(json.dumps(_plain(options, result), indent=1))
    _show(options, result)
    return 0 if (result.misses_nothing if given.strict else result.is_correct) else 1


def _show(options: Options, result: Result) -> None:
    out = Console() if sys.stdout.isatty() else Console(width=160)
    endings = ", ".join(f"{count} {ending}" for ending, count in sorted(result.endings.items()))
    title = (
        f"seed {options.seed}: {result.num_asks} requests in {result.wall_s:.0f} s under {len(result.harms)} harms; "
        f"tries: {endings}"
    )
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for name in ("what", "target", "measured", ""):
        table.add_column(name)
    for row in result.rows:
        verdict = "-" if row.ok is None else "pass" if row.ok else "MISS"
        table.add_row(row.what, row.target, row.measured, verdict)
    out.print(table)
    for sentence in result.faults[:_MAX_SHOWN]:
        print(sentence, file=sys.stderr)
    for sentence in result.rejections[:_MAX_SHOWN]:
        print(f"rejected {sentence}", file=sys.stderr)
    if not result.is_correct:
        print(f"chaos: have this run again with --seed {options.seed}", file=sys.stderr)


def _plain(options: Options, result: Result) -> dict[str, object]:
    given = {**asdict(options), "folder": str(options.folder) if options.folder else None}
    return {"options": given, "is_correct": result.is_correct, "misses_nothing": result.misses_nothing} | asdict(result)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _quiet(sentence: str) -> None:
    pass


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = Parser(
        prog="python -m loadtest.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seed", type=int, help="of harms and requests (default: a new one, which is printed)")
    p.add_argument("--requests", type=count, help=f"end after so many (default {DEFAULT_REQUESTS}, or --duration)")
    p.add_argument("--duration", type=above_zero, help="end after so many seconds")
    p.add_argument("--every", type=above_zero, default=10.0, help="seconds between harms, about (default 10)")
    p.add_argument("--clients", type=count, default=32, help="that ask at once (default 32)")
    p.add_argument("--workers", choices=("fake", "engine"), default="fake", help="numbered tokens, or bundled workers")
    p.add_argument("--model", default=TINY, help="for bundled workers (default: a tiny one with random weights)")
    p.add_argument(
        "--token-s", type=from_zero, default=0.02, help="seconds between a fake worker's tokens (default 0.02)"
    )
    p.add_argument("--no-redis", action="store_true", help="gateways that share nothing")
    p.add_argument("--calm", action="store_true", help="no harm at all: the control")
    p.add_argument("--strict", action="store_true", help="times and rates decide too")
    p.add_argument("--json", type=Path, help="write everything there")
    p.add_argument("--keep", type=Path, metavar="DIR", help="keep the processes' logs there")
    p.add_argument("--quiet", action="store_true", help="say nothing of each harm")
    return p
