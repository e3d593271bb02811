"""`make demo`: the same conversations through round_robin and through warm, on fresh caches each, side by side.

    python -m loadtest.demo [--conversations 8] [--turns 4] [--workers 2] [--model demo] [--out FILE.json]

What it shows: with round_robin a conversation's next turn lands anywhere, so its history is prefilled again on every
replica that it visits; with warm it goes where its history is cached, unless waiting there would take longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.client import chat
from loadtest.conversations import Script, Shape, play, write_script
from loadtest.demo_fleet import Fleet, FleetFailed, running_fleet
from loadtest.ending import interrupted_by_signals
from loadtest.options import Parser, count
from loadtest.records import Record, Summary, summarize

BASELINE, OURS = "round_robin", "warm"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console()
    shape = Shape(
        num_conversations=options.conversations,
        num_turns=options.turns,
        concurrency=options.concurrency or 2 * options.workers,
        seed=options.seed,
    )
    script = write_script(shape)
    records: dict[str, list[Record]] = {}
    interrupted_by_signals()
    for policy in (BASELINE, OURS):
        console.print(f"{policy}: starting {options.workers} workers with empty caches ...")
        try:
            with running_fleet(policy, options.model, options.workers) as fleet:
                records[policy] = asyncio.run(_run(fleet, script, shape, console))
        except FleetFailed as problem:
            print(problem, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    summaries = {policy: summarize(runs) for policy, runs in records.items()}
    console.print(table(summaries[BASELINE], summaries[OURS], options.workers))
    console.print(describe(shape, options.workers, summaries[OURS]))
    if options.out:
        raw = {policy: [asdict(record) for record in runs] for policy, runs in records.items()}
        options.out.write_text(json.dumps({"shape": asdict(shape), "records": raw}, indent=1))
    errors = [record.error for runs in records.values() for record in runs if record.error]
    if errors:
        print(f"{len(errors)} requests failed; the first said: {errors[0]}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="warmgate demo", description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=count, default=Shape().num_conversations)
    parser.add_argument("--turns", type=count, default=Shape().num_turns)
    parser.add_argument("--workers", type=count, default=2)
    parser.add_argument("--concurrency", type=count, default=0, help="users at once (default: two a worker)")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=Shape().seed)
    parser.add_argument("--out", type=Path, help="write every request's raw record as JSON")
    return parser


async def _run(fleet: Fleet, script: Script, shape: Shape, console: Console) -> list[Record]:
    timeout = httpx.Timeout(300.0)
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=timeout, trust_env=False) as client:
        with console.status("") as status:

            async def ask(messages: list[dict[str, str]], conversation: int, turn: int) -> Record:
                return await chat(client, fleet.model, messages, shape.answer_tokens, conversation, turn)

            def progress(done: int) -> None:
                status.update(f"{done} of {len(script.order)} requests answered")

            progress(0)
            return await play(script, shape, ask, progress)


def table(baseline: Summary, ours: Summary, num_workers: int) -> Table:
    """The comparison. A ratio is the better side over the worse one, so that more is better in every row."""
    shown = Table(title="The same conversations, fresh caches each")
    shown.add_column("")
    for name in (BASELINE, OURS, "ratio"):
        shown.add_column(name, justify="right")
    for label, name in (("TTFT median", "ttft_median_s"), ("TTFT p95", "ttft_p95_s")):
        before, after = getattr(baseline, name), getattr(ours, name)
        shown.add_row(label, f"{before * 1000:,.0f} ms", f"{after * 1000:,.0f} ms", _ratio(before, after))
    before, after = baseline.cached_share, ours.cached_share
    shown.add_row("cached-token share", f"{before:.1%}", f"{after:.1%}", _ratio(after, before))
    before, after = 1 - baseline.cached_share, 1 - ours.cached_share
    shown.add_row("prompt tokens computed", f"{before:.1%}", f"{after:.1%}", _ratio(before, after))
    shown.add_row("requests a replica", _spread(baseline, num_workers), _spread(ours, num_workers), "")
    shown.add_row(
        "whole run",
        f"{baseline.duration_s:.0f} s",
        f"{ours.duration_s:.0f} s",
        _ratio(baseline.duration_s, ours.duration_s),
    )
    return shown


def describe(shape: Shape, num_workers: int, ours: Summary) -> str:
    return (
        f"{shape.num_conversations} conversations of {shape.num_turns} turns, seed {shape.seed}, "
        f"{ours.prompt_tokens / max(1, ours.num_requests - ours.num_errors):,.0f} prompt tokens a request on average, "
        f"{shape.concurrency} users at once, {num_workers} workers."
    )


def _ratio(numerator: float, denominator: float) -> str:
    return f"{numerator / denominator:.2f}x" if denominator else "-"


def _spread(summary: Summary, num_workers: int) -> str:
    counts = list(summary.requests_per_replica.values())
    return " / ".join(map(str, [*counts, *[0] * (num_workers - len(counts))]))


if __name__ == "__main__":
    sys.exit(main())
