"""`python -m loadtest.validate`: is the simulator right? The same slice of a trace, simulated and live.

    python -m loadtest.validate --trace FILE --model demo --workers 2 --requests 200 --json OUT

Live: `warmgate up` with real workers. Their speed is measured at their API, all at once, as they will run, before the
slice is sent through the gateway and after it, and fitted to the service model (speed_fit.py); where the two differ,
the machine had something else to do, and that is said. Then the slice is simulated with the fitted speeds, the workers'
own block count and step budget, the same policy and the same moments. A trace's block of B tokens becomes one KV block,
so prompts of 12,000 tokens become some of 400, which a CPU can serve. The way of a request through gateway and HTTP,
which the simulator doesn't have, is measured too and added to its times to first token.

Printed side by side: hit ratio (target: within 2 points) and median time to first token (target: within 10 %).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from engine_worker.contract.state import WorkerState
from loadtest.demo_fleet import Fleet, FleetFailed, running_fleet
from loadtest.ending import interrupted_by_signals
from loadtest.fleet.driver import Driver, Replayed
from loadtest.fleet.text import Wording
from loadtest.fleet.wall import WallClock
from loadtest.options import Parser, above_zero, count
from loadtest.sim.figures import figures, mean, percentile
from loadtest.sim.gpus import Gpu
from loadtest.sim.job import Job, JobStatus
from loadtest.sim.prompts import PromptBook
from loadtest.sim.setup import Fleet as SimFleet
from loadtest.sim.setup import Load, Setup
from loadtest.sim.simulation import Simulation
from loadtest.sim.trace import Trace, TraceRequest, read_trace
from loadtest.speed_fit import Measured, fit, fit_way, medians

HIT_RATIO_TARGET = 0.02
TTFT_TARGET = 0.10
BLOCK_SIZE = 16
IDS = range(300, 1300)  # ordinary tokens in every vocabulary that we have met
DECODE_TOKENS = 24
TRIES = 3
WAY_TRIES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """`simulated` or `live`: what came of the slice."""

    hit_ratio: float
    ttft_p50_s: float
    ttft_mean_s: float
    ttft_p90_s: float
    tpot_mean_s: float
    num_requests: int
    num_failed: int


class IdSpeech:
    """A plain completion of token ids, so that the workers' blocks are the trace's whatever their tokenizer is."""

    api = "/v1/completions"
    scale = 1

    def body(self, request: TraceRequest, unique: str) -> dict[str, Any]:
        ids = [each for block in request.block_ids for each in random.Random(block).choices(IDS, k=BLOCK_SIZE)]
        ids += random.Random(f"rest/{unique}").choices(IDS, k=request.num_prompt_tokens - len(ids))
        return {"prompt": ids, "max_tokens": request.num_output_tokens, "ignore_eos": True}

    def num_prompt_tokens(self, request: TraceRequest) -> int:
        return request.num_prompt_tokens


def scaled(trace: Trace, max_model_len: int) -> Trace:
    """The trace with its blocks shrunk to BLOCK_SIZE tokens, and everything else with them."""
    wording = Wording(trace.block_tokens, trace.block_tokens // BLOCK_SIZE)
    sessions = tuple(
        tuple(
            replace(
                request,
                num_prompt_tokens=wording.num_words(request),
                num_output_tokens=wording.output_words(request),
            )
            for request in session
        )
        for session in trace.sessions
    )
    return replace(trace, block_tokens=BLOCK_SIZE, sessions=sessions).fitting(max_model_len)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when both targets are met, 1 otherwise."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True)
    interrupted_by_signals()
    worker_args = (
        *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", str(options.token_budget)),
        *("--threads", str(options.threads), "--kv-cache-memory", options.kv_cache_memory),
        *("--max-model-len", str(options.max_model_len), "--max-num-seqs", str(options.max_num_seqs)),
        *("--partial-hits", "off"),  # the simulator's prompts are made of whole blocks
        *shlex.split(options.worker_args),
    )
    try:
        trace = read_trace(options.trace, options.requests)
        console.print(f"starting {options.workers} workers with {options.model} ...")
        with running_fleet(options.policy, options.model, options.workers, worker_args) as fleet:
            found = asyncio.run(_validate(fleet, trace, options, console))
    except (ValueError, OSError, FleetFailed, httpx.HTTPError) as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    Console().print(table(found["simulated"], found["live"]))
    missed = misses(found["simulated"], found["live"])
    for sentence in missed:
        print(sentence, file=sys.stderr)
    if options.json:
        row = {**found, "simulated": asdict(found["simulated"]), "live": asdict(found["live"])}
        options.json.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    return 1 if missed else 0


async def _validate(fleet: Fleet, trace: Trace, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:
        urls, states = await _workers(client, fleet)
        trace = scaled(trace, states[0].max_model_len)
        most = min(states[0].max_model_len - DECODE_TOKENS - 1, options.token_budget)
        console.print("measuring the workers' speed ...")
        before, through = await _measured(client, fleet, urls, most, "before")
    gpus = [fit("worker", before, state.num_blocks) for state in states]
    rate = options.rate or options.load * len(gpus) / mean_work_s(trace, gpus, options.token_budget)
    load = Load(rate=rate)
    console.print(f"sending {trace.num_requests} requests at {rate:.2f} a second ...")
    driver = Driver((fleet.base_url,), fleet.model, trace, load, IdSpeech(), 1.0, options.seed)
    replayed = await driver.run()
    live = side(replayed)
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:
        after, through_after = await _measured(client, fleet, urls, most, "after")
    if (changed := drift(before, after)) > TTFT_TARGET:
        console.print(f"the workers' speed changed by {100 * changed:.0f} % meanwhile: free the machine and try again")
    both = pooled(before, after)
    gpus = [fit("worker", both, state.num_blocks) for state in states]
    way_s = fit_way(replace(both, ways=through + through_after))
    errors = sorted({job.reason for job in replayed.jobs if job.reason})
    for error in errors[:5]:
        console.print(error)
    setup = Setup(
        trace=options.trace,
        fleet=SimFleet(tuple(gpus), tuple(gpu.num_blocks for gpu in gpus), options.token_budget, options.max_num_seqs),
        load=load,
    )
    simulated = simulate(setup, trace, options.policy, options.seed, way_s)
    speed = {**asdict(gpus[0]), "way_s": way_s, "drift": changed}
    return {"simulated": simulated, "live": live, "rate": rate, "speed": speed, "errors": errors}


async def _workers(client: httpx.AsyncClient, fleet: Fleet) -> tuple[list[str], list[WorkerState]]:
    health = (await client.get(f"{fleet.base_url}/health")).raise_for_status().json()
    host = urlsplit(fleet.base_url).hostname
    urls = [f"http://{host}:{each['id'].rpartition(':')[2]}" for each in health["replicas"]]
    answers = [(await client.get(f"{url}/internal/state")).raise_for_status() for url in urls]
    return urls, [msgspec.json.decode(answer.content, type=WorkerState) for answer in answers]


async def _measured(
    client: httpx.AsyncClient, fleet: Fleet, urls: Sequence[str], most: int, moment: str
) -> tuple[Measured, tuple[float, ...]]:
    """All workers at once, as they will run; and the ways through the gateway. The workers are alike, and so one fit
    of all that was measured is the truest."""
    each = await asyncio.gather(*[_measure(client, url, fleet.model, most, f"{moment}/{url}") for url in urls])
    ways = await asyncio.gather(*[_ways(client, fleet.base_url, fleet.model) for _ in urls])
    return pooled(*each), tuple(way for some in ways for way in some)


def pooled(*measured: Measured) -> Measured:
    return Measured(
        tuple(pair for each in measured for pair in each.prefills),
        tuple(pair for each in measured for pair in each.decodes),
        tuple(way for each in measured for way in each.ways),
    )


def drift(before: Measured, after: Measured) -> float:
    """By which share prompts took longer or less long afterwards, of the longer."""
    times = [sum(seconds for _, seconds in medians(each.prefills)) for each in (before, after)]
    return 1.0 - min(times) / max(times)


async def _measure(client: httpx.AsyncClient, url: str, model: str, most: int, name: str) -> Measured:
    """Prompts and decodes one after the other, nothing of them cached."""
    lengths = sorted({most * share // 16 for share in (4, 6, 8, 12, 16)})
    prefills, decodes = [], []
    for attempt in range(TRIES + 1):
        for length in lengths:
            rng = random.Random(f"measure/{name}/{attempt}/{length}")
            ttft_s, tpot_s = await _timed(client, url, model, rng.choices(IDS, k=length))
            if attempt:  # the first round warms up
                prefills.append((length, ttft_s))
                decodes.append((length + DECODE_TOKENS // 2, tpot_s))
    return Measured(tuple(prefills), tuple(decodes), await _ways(client, url, model))


async def _ways(client: httpx.AsyncClient, url: str, model: str) -> tuple[float, ...]:
    """Seconds to the first token of a prompt that is no work to speak of; the first try warms up."""
    tries = [(await _timed(client, url, model, [IDS[number]]))[0] for number in range(WAY_TRIES + 1)]
    return tuple(tries[1:])


async def _timed(client: httpx.AsyncClient, url: str, model: str, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and from token to token."""
    body = {"model": model, "prompt": prompt, "max_tokens": DECODE_TOKENS, "ignore_eos": True, "temperature": 0}
    clock = WallClock(1.0)
    first = None
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            raise ValueError(f"a worker answered {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if first is None and line.startswith("data:"):
                first = clock.read()
    last = clock.read()
    clock.close()
    assert first is not None, "an answer without a token"
    return first, (last - first) / (DECODE_TOKENS - 1)


def mean_work_s(trace: Trace, gpus: Sequence[Gpu], token_budget: int) -> float:
    """Seconds that one worker takes for a request, served alone with nothing cached."""
    gpu = max(gpus, key=lambda each: each.linear_s)
    works = [
        gpu.cold_prefill_s(request.num_prompt_tokens, token_budget)
        + gpu.decode_run_s(max(request.num_output_tokens - 1, 0), 1, request.num_prompt_tokens)
        for session in trace.sessions
        for request in session
    ]
    return mean(works)


def simulate(setup: Setup, trace: Trace, policy: str, seed: int, way_s: float = 0.0) -> Side:
    """`way_s`: seconds that a client waits for each first token beside the simulation's."""
    simulation = Simulation(setup, trace, PromptBook(), policy, seed)
    simulation.run()
    row = figures(simulation, policy, seed).row()
    for name in ("ttft_p50_s", "ttft_mean_s", "ttft_p90_s"):
        row[name] += way_s
    return Side(**{name: row[name] for name in Side.__dataclass_fields__})


def side(replayed: Replayed) -> Side:
    """Raises ValueError when nothing was answered."""
    done: list[Job] = [job for job in replayed.jobs if job.status is JobStatus.DONE]
    if not done:
        raise ValueError(f"no request was answered; one said: {replayed.jobs[0].reason}")
    ttfts = sorted(job.ttft_s for job in done)
    return Side(
        hit_ratio=sum(job.cached_tokens for job in done) / sum(job.trace.num_prompt_tokens for job in done),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_mean_s=mean(ttfts),
        ttft_p90_s=percentile(ttfts, 90),
        tpot_mean_s=mean([job.tpot_s for job in done if job.trace.num_output_tokens > 1] or [0.0]),
        num_requests=len(replayed.jobs),
        num_failed=len(replayed.jobs) - len(done),
    )


def misses(simulated: Side, live: Side) -> list[str]:
    """Targets missed, in sentences."""
    found = []
    if (difference := abs(simulated.hit_ratio - live.hit_ratio)) > HIT_RATIO_TARGET:
        found.append(f"the hit ratios differ by {100 * difference:.1f} points, more than {100 * HIT_RATIO_TARGET:.0f}")
    if (difference := abs(simulated.ttft_p50_s / live.ttft_p50_s - 1)) > TTFT_TARGET:
        found.append(f"the median TTFTs differ by {100 * difference:.0f} %, more than {100 * TTFT_TARGET:.0f} %")
    if live.num_failed:
        found.append(f"{live.num_failed} of {live.num_requests} requests failed")
    return found


def table(simulated: Side, live: Side) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title="The same slice, simulated and live")
    for heading in ("", "simulated", "live", "difference"):
        shown.add_column(heading, justify="right" if heading else "left")
    points = 100 * (simulated.hit_ratio - live.hit_ratio)
    shown.add_row("hit ratio", f"{simulated.hit_ratio:.3f}", f"{live.hit_ratio:.3f}", f"{points:+.1f} points")
    labels = {"ttft_p50_s": "TTFT median", "ttft_mean_s": "TTFT mean", "ttft_p90_s": "TTFT p90", "tpot_mean_s": "TPOT"}
    for name, label in labels.items():
        left, right = getattr(simulated, name), getattr(live, name)
        change = f"{100 * (left / right - 1):+.0f} %" if right else ""
        shown.add_row(label, f"{1000 * left:,.0f} ms", f"{1000 * right:,.0f} ms", change)
    return shown


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m loadtest.validate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--trace", type=Path, required=True)
    p.add_argument("--requests", type=count, default=200, help="read only so many requests of the trace")
    p.add_argument("--model", default="demo")
    p.add_argument("--workers", type=count, default=2)
    p.add_argument("--threads", type=count, default=1, help="torch threads of a worker")
    p.add_argument("--kv-cache-memory", default="256MiB", help="of a worker")
    p.add_argument("--max-model-len", type=count, default=2048, help="longer requests are left out")
    p.add_argument("--token-budget", type=count, default=512, help="tokens a step at most")
    p.add_argument("--max-num-seqs", type=count, default=64)
    p.add_argument("--worker-args", default="", help="more for `warmgate worker`, such as '--load-format dummy'")
    p.add_argument("--policy", default="warm")
    p.add_argument(
        "--load", type=above_zero, default=0.5, help="share of what the workers could serve with nothing cached"
    )
    p.add_argument("--rate", type=above_zero, help="requests a second, instead of --load")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json", type=Path)
    return p


if __name__ == "__main__":
    sys.exit(main())
