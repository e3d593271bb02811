"""`python -m loadtest.sim.compare --traces FOLDER`: every policy on both public traces, five seeds, one command.

    conversation  Mooncake's conversation trace, open loop, 8 H100 with 3,000 blocks of 512 tokens each, at 7.9 requests
                  a second: about nine tenths of what one shared cache (pooled) serves within the objective
    agents        Claude Code sessions, 160 users in a closed loop with their think times, 8 H200 with 3,200 blocks
    thrash        the same with 200 users: their working set no longer fits (with --scenarios only)

Requests longer than the model's 131,072 tokens are left out. FOLDER holds mooncake_conversation.jsonl.gz (from
kvcache-ai/Mooncake, Apache-2.0) and claude_code_sessions.jsonl.gz (from callanjfox/kv-cache-tester, Apache-2.0).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.ending import interrupted_by_signals
from loadtest.options import Parser, count
from loadtest.sim.cli import bounded_policy, check_policies, run_with_bar, table_console
from loadtest.sim.gpus import gpu_named
from loadtest.sim.report import check_json, objects, show, write_json
from loadtest.sim.runs import Outcome, Task
from loadtest.sim.setup import Fleet, Load, Setup

MAX_MODEL_LEN = 131_072
REPLICAS = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """`label`: the load as tables and pictures name it, in `label_name`s."""

    file: str
    gpu: str
    num_blocks: int
    load: Load
    label_name: str
    label: float

    def setup(self, traces: Path) -> Setup:
        fleet = Fleet((gpu_named(self.gpu),) * REPLICAS, (self.num_blocks,) * REPLICAS)
        return Setup(traces / self.file, fleet, self.load, max_model_len=MAX_MODEL_LEN)


def _agents(users: int) -> Scenario:
    load = Load(users=users, ramp_s=300.0, duration_s=3600.0)
    return Scenario("claude_code_sessions.jsonl.gz", "h200", 3200, load, "users", users)


SCENARIOS = {
    "conversation": Scenario("mooncake_conversation.jsonl.gz", "h100", 3000, Load(rate=7.9), "rate", 7.9),
    "agents": _agents(160),
    "thrash": _agents(200),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all went well, 1 with one sentence on stderr otherwise."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    interrupted_by_signals()
    try:
        check_json(options.json)
        policies = check_policies(options.policies)
        names = options.scenarios.split(",")
        unknown = [name for name in names if name not in SCENARIOS]
        if unknown:
            raise ValueError(f"unknown scenario {unknown[0]!r}: choose among {', '.join(SCENARIOS)}")
        outcomes = run_with_bar(_tasks(names, policies, options), options.jobs, console)
        _report(names, outcomes, options)
    except (ValueError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _tasks(names: Sequence[str], policies: Sequence[str], options: argparse.Namespace) -> list[Task]:
    """One trace after the other: a process reads each once."""
    tasks = []
    for name in names:
        scenario = SCENARIOS[name]
        setup = scenario.setup(options.traces)
        for seed in range(1, options.seeds + 1):
            for policy in policies:
                first = seed == 1
                pictured = first and options.plots is not None
                bounded = first and policy == bounded_policy(policies)
                tasks.append(Task(setup, policy, seed, scenario.label, bounded, pictured))
    return tasks


def _report(names: Sequence[str], outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for name in names:
        scenario = SCENARIOS[name]
        setup = scenario.setup(options.traces)
        own = [outcome for outcome in outcomes if outcome.task.setup == setup]
        show(table_console(), own, f"{name}, {REPLICAS} x {scenario.gpu}", scenario.label_name)
        rows += [{"scenario": name, **row} for row in objects(own, scenario.label_name)]
        if options.plots is not None:
            from loadtest.sim.plots import draw

            draw(options.plots / name, own, name, scenario.label_name)
    if options.json is not None:
        write_json(options.json, rows)


def _parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m loadtest.sim.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--traces", type=Path, required=True, help="the folder with the two trace files")
    p.add_argument("--scenarios", default="conversation,agents")
    p.add_argument("--policies", default="all")
    p.add_argument("--seeds", type=count, default=5)
    p.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes (default: one a core)")
    p.add_argument("--json", type=Path)
    p.add_argument("--plots", type=Path)
    return p


if __name__ == "__main__":
    sys.exit(main())
