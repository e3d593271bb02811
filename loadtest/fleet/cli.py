"""`python -m loadtest.fleet`: a slice of a trace, live, through one gateway after the other.

    python -m loadtest.fleet --trace FILE --gateways warmgate,sglang-router,vllm-router,litellm --replicas 8 \\
        --gpu h100 --blocks 3000 --rate 8 --slice 300 --speedup 2 --rounds 3 --json OUT

Gateways: warmgate, warmgate-text, sglang-router, vllm-router, litellm, each with :POLICY for another than its default,
warmgate*2 for two of ours that share what they know over Redis, and sim:POLICY for the same run in the simulator. Round
n replays with seed n; the order turns by one each round, so that no gateway always has the machine at its warmest. Each
run has a fresh fleet with empty caches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from loadtest.ending import interrupted_by_signals
from loadtest.fleet.gateways import DEFAULT_PEERS, GatewayFailed, count_of, kind_of
from loadtest.fleet.report import doubts, table, write_json
from loadtest.fleet.runs import SIM, FakesFailed, Plan, Row, run
from loadtest.fleet.text import Wording
from loadtest.options import Parser, above_zero, count, from_zero, whole
from loadtest.sim.gpus import TOKEN_BUDGET, parse_fleet
from loadtest.sim.setup import Fleet, Load, Objective, Setup
from loadtest.sim.trace import BLOCK_TOKENS, read_trace
from policies.registry import make_policy

DEFAULT_GATEWAYS = "warmgate,sglang-router,vllm-router"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every request of every run was answered; 1, with sentences on stderr, otherwise."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True)
    rows: list[Row] = []
    interrupted_by_signals()
    try:
        names = check_gateways(options.gateways)
        plan = plan_of(options)
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                rows.append(_with_bar(plan, name, number + 1, console))
                if options.json:
                    write_json(options.json, rows)  # after each, so that a long sitting that breaks is not lost
    except (ValueError, OSError, GatewayFailed, FakesFailed) as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    out = Console() if sys.stdout.isatty() else Console(width=170)
    rows.sort(key=lambda row: names.index(row.gateway))
    out.print(table(rows, f"{plan.trace.name}, {options.replicas} x {options.gpu}"))
    found = doubts(rows)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if any(row.num_failed for row in rows) else 0


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises ValueError."""
    gpus = parse_fleet(options.gpu, options.replicas)
    trace = read_trace(options.trace, options.requests, options.max_model_len)
    wording = Wording(trace.block_tokens, options.compress)
    blocks = (options.blocks,) * len(gpus)
    if options.blocks is None:
        blocks = tuple(gpu.num_blocks * BLOCK_TOKENS // trace.block_tokens for gpu in gpus)
    load = Load(
        rate=options.rate,
        users=options.users,
        max_think_s=options.max_think,
        ramp_s=options.ramp,
        duration_s=options.slice,
    )
    setup = Setup(
        trace=options.trace,
        fleet=Fleet(tuple(gpus), blocks, options.token_budget, options.max_num_seqs, options.joint_prefill_tokens),
        load=load,
        objective=Objective(options.ttft_objective, options.tpot_objective),
    )
    return Plan(wording.as_served(trace), setup, options.gpu, wording, options.speedup, options.peers)


def check_gateways(text: str) -> list[str]:
    """Raises ValueError, UnknownPolicy."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError("--gateways is empty: name one at least")
    for name in names:
        kind, _, policy = name.partition(":")
        if kind != SIM:
            count_of(name)
        if policy and (kind == SIM or kind_of(name).is_ours):
            make_policy(policy)
    return names


def _with_bar(plan: Plan, name: str, seed: int, console: Console) -> Row:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} sent"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        row = bar.add_task(f"{name}, round {seed}", total=None)
        return run(plan, name, seed, lambda sent: bar.update(row, completed=sent))


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = Parser(
        prog="python -m loadtest.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--trace", type=Path, required=True, help="a trace, in one of the formats that warmgate replay --help tells"
    )
    p.add_argument("--gateways", default=DEFAULT_GATEWAYS, help=f"default {DEFAULT_GATEWAYS}")
    p.add_argument("--peers", type=Path, default=DEFAULT_PEERS, help="virtual environments of others' gateways")
    p.add_argument("--rounds", type=count, default=1, help="how often each gateway runs")
    p.add_argument("--json", type=Path, help="write a list of objects, one a run")
    p.add_argument("--speedup", type=above_zero, default=1.0, help="seconds of the trace in a second")
    p.add_argument("--compress", type=count, default=16, help="tokens of the trace to a word of text")
    p.add_argument("--requests", type=count, help="read only so many requests of the trace")
    p.add_argument("--max-model-len", type=count, help="leave out requests of more tokens (prompt and output)")
    fleet = p.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=count, default=8)
    fleet.add_argument("--gpu", default="h100", help="l4, a100, h100, h200, or a mixed fleet: h100:4,l4:4")
    fleet.add_argument("--blocks", type=count, help="KV blocks a replica (default: what fits)")
    fleet.add_argument("--token-budget", type=count, default=TOKEN_BUDGET)
    fleet.add_argument("--max-num-seqs", type=count, default=256)
    fleet.add_argument(
        "--joint-prefill-tokens",
        type=whole,
        default=JOINT_PREFILL_TOKENS,
        help="tokens of prompts completed in one step, where several are (0: fill every step), of all gateways' fakes",
    )
    load = p.add_argument_group("load")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument(
        "--rate", type=from_zero, default=0.0, help="requests a second of the trace, open loop (0: its own)"
    )
    kind.add_argument("--users", type=whole, default=0, help="so many users, closed loop")
    load.add_argument("--slice", type=above_zero, help="send nothing after so many seconds of the trace")
    load.add_argument("--max-think", type=from_zero, default=float("inf"), help="cut thinks to so many seconds")
    load.add_argument("--ramp", type=from_zero, default=300.0, help="users start within so many seconds")
    load.add_argument("--ttft-objective", type=from_zero, default=0.5, help="seconds above the cold prefill")
    load.add_argument("--tpot-objective", type=from_zero, default=0.05, help="seconds an output token")
    return p
