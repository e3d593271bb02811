"""The highest rate at which a policy keeps a share of its requests within the objective: what `--load` is a share of.

Found by section: each round simulates as many rates as there are processes inside the bracket and keeps the part where
the share falls below the limit. The same fleet, trace and limits give the same answer, so it is kept in a cache file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from loadtest.sim.runs import Task, run_all
from loadtest.sim.setup import Setup
from loadtest.sim.trace import read_trace

SHARE = 0.9
PRECISION = 0.02
VERSION = 2  # of the simulation: raise it when results change


class NoSuchRate(ValueError):
    """Not even a trickle is served well; the message says what to change."""


def highest_rate(
    setup: Setup, policy: str, num_processes: int, cache: Path | None = None, tell: Callable[[str], None] | None = None
) -> float:
    """Requests a second for the fleet, with seed 1. Raises NoSuchRate."""
    file = (cache or default_cache()) / "rates.json"
    known = _read(file)
    key = _digest(setup, policy)
    if key not in known:
        known[key] = _search(setup, policy, num_processes, tell)
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {**_read(file), key: known[key]}
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1), "utf-8")
        partial.replace(file)
    return known[key]


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "warmgate" / "sim"


def highest_tried(setup: Setup) -> float:
    """The rate up to which is searched: twice what the fleet could compute of it with nothing cached."""
    trace = read_trace(setup.trace, setup.limit, setup.max_model_len)
    cold = [setup.fleet.fastest.cold_prefill_s(request.num_prompt_tokens) for request in trace.requests()]
    return 2.0 * setup.fleet.size * len(cold) / sum(cold)


def _search(setup: Setup, policy: str, num_processes: int, tell: Callable[[str], None] | None) -> float:
    low, high = 0.0, highest_tried(setup)
    guess = high / 2.0
    width = max(num_processes, 1)
    while high - low > PRECISION * high:
        step = (high - low) / (width + 1)
        rates = [low + step * (place + 1) for place in range(width)]
        tasks = [Task(replace(setup, load=replace(setup.load, rate=rate)), policy, 1) for rate in rates]
        outcomes = {outcome.task.setup.load.rate: outcome.figures for outcome in run_all(tasks, num_processes)}
        for rate in rates:
            if tell is not None:
                tell(f"{policy} at {rate:.2f} requests/s: {outcomes[rate].within_objective:.1%} within the objective")
            if outcomes[rate].within_objective < SHARE:
                high = rate
                break
            low = rate
        if high < PRECISION * guess / 10:
            raise NoSuchRate(f"{policy} keeps {SHARE:.0%} within the objective at no rate: give --rate instead")
    return low


def _digest(setup: Setup, policy: str) -> str:
    """Everything that the answer depends on."""
    facts = asdict(setup)
    facts["load"].pop("rate")
    facts["load"].pop("users")
    facts["trace"] = hashlib.sha256(setup.trace.read_bytes()).hexdigest()
    text = json.dumps([VERSION, SHARE, policy, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(file: Path) -> dict[str, float]:
    try:
        return {str(key): float(value) for key, value in json.loads(file.read_text("utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return {}
