"""`warmgate replay` (or `python -m loadtest.sim`): policies side by side over a trace, in simulated time.

    warmgate replay --trace FILE --policies warm,round_robin,pooled --replicas 8 --gpu h100 --blocks 3000 \\
        --rate R | --load F | --users N  --seeds 5 --json OUT --plots FOLDER

--rate is requests a second for the fleet; --load a share of the highest rate at which least_loaded (or --load-of) keeps
90 % of its requests within the objective; --users a closed loop. Each takes several values, separated by commas.
`pooled` may stand among the policies: the limit of one shared cache. --policies all: all there are, and pooled.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from loadtest.ending import interrupted_by_signals
from loadtest.options import Parser, above_zero, count, from_zero, share, whole
from loadtest.sim.gpus import TOKEN_BUDGET, parse_fleet
from loadtest.sim.pooled import NAME as POOLED
from loadtest.sim.report import BASELINE, OWN_PACE, assumptions, check_json, objects, show, write_json
from loadtest.sim.runs import Outcome, Task, run_all
from loadtest.sim.search import PRECISION, highest_rate, highest_tried
from loadtest.sim.setup import Conditions, Fleet, Load, Objective, Setup
from loadtest.sim.trace import BLOCK_TOKENS, FORMATS_HELP, read_trace
from policies.registry import make_policy, policy_names

DEFAULT_POLICIES = "round_robin,least_loaded,warm,pooled"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all went well, 1 with one sentence on stderr otherwise."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True)
    interrupted_by_signals()
    try:
        check_json(options.json)
        outcomes, label_name = simulate(options, console)
        title = f"{options.trace.name}, {_fleet_title(options)}"
        show(table_console(), outcomes, title, label_name)
        table_console().print(assumptions(outcomes[0].task.setup))
        if options.json:
            write_json(options.json, objects(outcomes, label_name))
        if options.plots:
            _draw(options.plots, outcomes, title, label_name, console)
    except (ValueError, OSError) as problem:  # BadTrace, UnknownPolicy, UnknownGpu, NoSuchRate and their like
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def simulate(options: argparse.Namespace, console: Console) -> tuple[list[Outcome], str]:
    """All runs that the options ask for, and what their labels are (rate, load or users)."""
    policies = check_policies(options.policies)
    setup = setup_of(options)
    label_name, loads = _loads(options, setup, console)
    tasks = [
        Task(
            replace(setup, load=load),
            policy,
            seed,
            label,
            want_bounds=policy == bounded_policy(policies) and seed == 1,
            want_series=bool(options.plots) and seed == 1,
        )
        for label, load in loads
        for seed in range(1, options.seeds + 1)
        for policy in policies
    ]
    return run_with_bar(tasks, options.jobs, console), label_name


def run_with_bar(tasks: Sequence[Task], num_processes: int, console: Console) -> list[Outcome]:
    """Runs them all; the bar tells how much is done (in runs) and how long the rest will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.1f}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        row = bar.add_task("simulating", total=len(tasks))
        shares = [0.0] * len(tasks)

        def told(index: int, share: float) -> None:
            bar.advance(row, max(share - shares[index], 0.0))
            shares[index] = max(share, shares[index])

        outcomes = list(run_all(tasks, num_processes, told))
    place = {task: index for index, task in enumerate(tasks)}
    return sorted(outcomes, key=lambda outcome: place[outcome.task])


def table_console() -> Console:
    """Wide enough for the table where nobody's terminal says otherwise."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def setup_of(options: argparse.Namespace) -> Setup:
    """The fleet and its conditions. Raises ValueError."""
    gpus = parse_fleet(options.gpu, options.replicas)
    trace = read_trace(options.trace, 1)
    blocks = _blocks(options, trace.block_tokens)
    return Setup(
        trace=options.trace,
        fleet=Fleet(tuple(gpus), blocks, options.token_budget, options.max_num_seqs, options.joint_prefill_tokens),
        load=Load(
            max_think_s=options.max_think,
            think_scale=options.think_scale,
            ramp_s=options.ramp,
            duration_s=options.duration,
        ),
        conditions=Conditions(
            gateways=options.gateways,
            share_delay_s=options.share_delay,
            kv_feed=options.kv_feed,
            feed_delay_s=options.feed_delay,
            feed_loss=options.feed_loss,
            poll_s=options.poll,
            mtbf_s=options.mtbf,
            mttr_s=options.mttr,
        ),
        objective=Objective(options.ttft_objective, options.tpot_objective),
        limit=options.requests,
        max_model_len=options.max_model_len,
        reuse_outputs=options.reuse_outputs,
    )


def _blocks(options: argparse.Namespace, block_tokens: int) -> tuple[int, ...]:
    """--blocks for all, or one for each kind in --gpu, or else what fits on each GPU."""
    gpus = parse_fleet(options.gpu, options.replicas)
    if options.blocks is None:
        return tuple(gpu.num_blocks * BLOCK_TOKENS // block_tokens for gpu in gpus)
    given = _numbers(options.blocks, int, "--blocks")
    if len(given) == 1:
        return tuple(given * len(gpus))
    kinds = [int(part.partition(":")[2] or len(gpus)) for part in options.gpu.split(",")]
    if len(kinds) != len(given):
        raise ValueError(f"--blocks {options.blocks}: give one number, or one for each kind in --gpu {options.gpu}")
    return tuple(size for size, count in zip(given, kinds, strict=True) for _ in range(count))


def _loads(options: argparse.Namespace, setup: Setup, console: Console) -> tuple[str, list[tuple[float, Load]]]:
    if options.users is not None:
        users = _numbers(options.users, int, "--users")
        return "users", [(count, replace(setup.load, users=count)) for count in users]
    if options.load is not None:
        top = highest_rate(setup, options.load_of, options.jobs, tell=lambda text: console.print(text, style="dim"))
        console.print(_load_words(top, highest_tried(setup), options.load_of))
        shares = _numbers(options.load, float, "--load")
        return "load", [(share, replace(setup.load, rate=share * top)) for share in shares]
    if options.rate is None:
        # A trace without times has no pace of its own; its sessions begin so that a request comes a second.
        if not read_trace(options.trace, 1).timed:
            return "rate", [(1.0, replace(setup.load, rate=1.0))]
        return OWN_PACE, [(0.0, setup.load)]
    rates = _numbers(options.rate, float, "--rate")
    return "rate", [(rate, replace(setup.load, rate=rate)) for rate in rates]


def _load_words(top: float, tried: float, policy: str) -> str:
    if tried - top > PRECISION * tried:  # as the search ends
        return f"load 1 is {top:.2f} requests/s, the most at which {policy} keeps 90 % within"
    return (
        f"no limit within this trace: {policy} still keeps 90 % within at {top:.2f} requests/s, of which --load is a "
        "share here; a longer trace or a smaller fleet would have one, and --rate needs none"
    )


def bounded_policy(policies: Sequence[str]) -> str:
    """Whose run the bounds are computed for (a closed loop sends a faster fleet other requests): the pooled one's."""
    return POOLED if POOLED in policies else policies[0]


def check_policies(text: str) -> list[str]:
    """The names in a list such as --policies takes. Raises ValueError, UnknownPolicy."""
    if text == "all":
        return [*policy_names(), POOLED]
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--policies is empty: choose among {', '.join((*policy_names(), POOLED))}")
    for name in names:
        if name != POOLED:
            make_policy(name)
    return names


def _numbers(text: str, kind: Callable[[str], float], flag: str) -> list:  # type: ignore[type-arg]
    try:
        values = [kind(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{flag} {text}: numbers separated by commas are expected") from None
    if not all(0 < value < float("inf") for value in values):
        raise ValueError(f"{flag} {text}: every number must be more than 0")
    return values


def _fleet_title(options: argparse.Namespace) -> str:
    return options.gpu if ":" in options.gpu else f"{options.replicas} x {options.gpu}"


def _draw(folder: Path, outcomes: list[Outcome], title: str, label_name: str, console: Console) -> None:
    try:
        from loadtest.sim.plots import draw
    except ImportError:
        raise ValueError(
            "plots need matplotlib: pip install '.[loadtest]' in the project's folder, or leave --plots out"
        ) from None
    for path in draw(folder, outcomes, title, label_name):
        console.print(f"wrote {path}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default where a flag's help doesn't and there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.default in (None, False, argparse.SUPPRESS) or action.default == float("inf")
        text = action.help or ""
        return text if is_plain or "default" in text else f"{text} (default {action.default})".strip()


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = Parser(
        prog="warmgate replay",
        description=__doc__,
        epilog="formats of traces:\n" + FORMATS_HELP,
        formatter_class=_Help,
    )
    p.add_argument("--trace", type=Path, required=True, help="JSON Lines, gzipped or not, in one of the formats below")
    p.add_argument("--policies", default=DEFAULT_POLICIES, help=f"names, or all (default {DEFAULT_POLICIES})")
    p.add_argument("--requests", type=count, help="read only so many requests of the trace")
    p.add_argument("--max-model-len", type=count, help="leave out requests of more tokens (prompt and output)")
    p.add_argument("--reuse-outputs", action="store_true", help="later prompts hit the blocks that answers filled")
    fleet = p.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=count, default=8, help="how many, of a fleet of one kind")
    fleet.add_argument("--gpu", default="h100", help="l4, a100, h100, h200, or a mixed fleet: h100:4,l4:4")
    fleet.add_argument("--blocks", help="KV blocks a replica (default: what fits); for a mixed fleet one for each kind")
    fleet.add_argument("--token-budget", type=count, default=TOKEN_BUDGET, help="tokens a step at most")
    fleet.add_argument("--max-num-seqs", type=count, default=256, help="requests that a replica serves at once")
    fleet.add_argument(
        "--joint-prefill-tokens",
        type=whole,
        default=JOINT_PREFILL_TOKENS,
        help="tokens of prompts completed in one step, where several are (0: fill every step)",
    )
    load = p.add_argument_group("load")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument(
        "--rate", help="requests/s for the fleet, open loop (default: the trace's own; 1 where it has no times)"
    )
    kind.add_argument("--load", help="share of the highest rate that --load-of serves well, open loop")
    kind.add_argument("--users", help="so many users, closed loop")
    load.add_argument(
        "--load-of", default=BASELINE, help=f"the policy that load 1 is measured with (default {BASELINE})"
    )
    load.add_argument("--max-think", type=from_zero, default=float("inf"), help="cut thinks to so many seconds")
    load.add_argument("--think-scale", type=from_zero, default=1.0, help="multiply thinks by it")
    load.add_argument("--ramp", type=from_zero, default=300.0, help="users start within so many seconds")
    load.add_argument("--duration", type=above_zero, help="send nothing after so many seconds")
    load.add_argument("--ttft-objective", type=from_zero, default=0.5, help="seconds above the cold prefill")
    load.add_argument("--tpot-objective", type=from_zero, default=0.05, help="seconds an output token")
    rest = p.add_argument_group("conditions")
    rest.add_argument("--gateways", type=count, default=1, help="among which requests are dealt out")
    rest.add_argument(
        "--share-delay", type=from_zero, default=0.0, help="seconds until a gateway knows of the others' news"
    )
    rest.add_argument("--kv-feed", action="store_true", help="replicas publish KV events")
    rest.add_argument("--feed-delay", type=from_zero, default=0.0, help="seconds that a KV event takes")
    rest.add_argument("--feed-loss", type=share, default=0.0, help="probability that a step's KV events are lost")
    rest.add_argument("--poll", type=from_zero, default=0.0, help="seconds between load reports of a replica (0: none)")
    rest.add_argument("--mtbf", type=from_zero, default=0.0, help="mean seconds between a replica's deaths (0: none)")
    rest.add_argument("--mttr", type=above_zero, default=30.0, help="seconds until a dead replica is back")
    out = p.add_argument_group("output")
    out.add_argument("--seeds", type=count, default=1, help="so many seeds, from 1")
    out.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes (default: one a core)")
    out.add_argument("--json", type=Path, help="write a list of objects, one a run")
    out.add_argument("--plots", type=Path, help="a folder for pictures")
    return p
