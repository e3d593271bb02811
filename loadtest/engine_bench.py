"""Engines side by side over HTTP: `python -m loadtest.engine_bench ours=http://127.0.0.1:8101 peer=http://127.0.0.1:8102`.

Each URL is any engine with OpenAI's streaming /v1/completions that honours `ignore_eos` and stream_options'
include_usage. The engines take turns, case by case and round by round, so that whatever else the machine does falls on
all of them; the table gives medians and each one's ratio to the first. Give every engine the same cores (taskset), and
none of them work besides.

With `--model-bytes` and `--model-params` the table also says which share of this machine's limits the first engine
reached, both measured here, on this process's cores (engine_worker/bench/limits.py): decoding one request reads all
weights for every token, prefill multiplies and adds once a parameter and token.

transformers' continuous batching becomes such an engine by `python -m engine_worker.bench.transformers_peer`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

_TEXT = (
    "amber basil cedar delta ember fable grove heron inlet jasper kettle larch maple nettle opal pebble quartz reed "
    "sable thistle umber velvet willow yarrow zephyr bridge canal door engine field garden house island journey"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Case:
    """`num_requests` in all, `concurrency` at once; own and shared words of a prompt; what is reported.

    A prompt that repeats its own words invites a copy, as editing text or code does: what n-gram speculation is for.
    """

    name: str
    num_requests: int
    concurrency: int
    own_words: int
    shared_words: int
    max_tokens: int
    measure: str  # output: tokens out a second; prefill: prompt tokens a second; ttft: ms
    repeats: int = 1


CASES = (
    Case("decode, 1 request", 2, 1, 20, 0, 64, "output"),
    Case("decode, 8 requests", 8, 8, 64, 0, 48, "output"),
    Case("decode, 32 requests", 32, 32, 64, 0, 48, "output"),
    Case("prefill, 900 tokens", 2, 1, 700, 0, 1, "prefill"),
    Case("warm prefix, TTFT", 4, 1, 12, 700, 1, "ttft"),
    Case("mixed, shared prefix", 16, 8, 40, 400, 24, "output"),
    Case("copying, 1 request", 2, 1, 60, 0, 96, "output", repeats=4),
    Case("copying, 8 requests", 8, 8, 60, 0, 48, "output", repeats=4),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times in seconds."""

    ttft_s: float
    num_prompt_tokens: int
    num_output_tokens: int


class EngineFailed(Exception):
    """An engine did not answer as it must. The message names it and says what came."""


async def run_case(session: aiohttp.ClientSession, url: str, model: str, case: Case, seed: int) -> float:
    """One round of a case on one engine. Returns its measure. Raises EngineFailed."""
    gate = asyncio.Semaphore(case.concurrency)
    shared = _words(case.shared_words, seed)

    async def one(index: int) -> Sample:
        async with gate:
            own = [_words(case.own_words, seed * 1009 + index + 1)] * case.repeats
            prompt = " ".join((shared, *own)).strip()
            return await _complete(session, url, model, prompt, case.max_tokens)

    if case.shared_words:
        await one(case.num_requests)  # whoever comes first fills the cache and is not counted
    start = time.perf_counter()
    samples = await asyncio.gather(*(one(index) for index in range(case.num_requests)))
    wall_s = time.perf_counter() - start
    if case.measure == "ttft":
        return statistics.median(sample.ttft_s for sample in samples) * 1e3
    if case.measure == "prefill":
        return sum(sample.num_prompt_tokens for sample in samples) / sum(sample.ttft_s for sample in samples)
    return sum(sample.num_output_tokens for sample in samples) / wall_s


async def _complete(session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    start, first_s, usage = time.perf_counter(), None, None
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise EngineFailed(f"{url} answered {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = msgspec.json.decode(line[6:])
                usage = event.get("usage") or usage
                if event.get("choices") and first_s is None:
                    first_s = time.perf_counter() - start
    except aiohttp.ClientError as error:
        raise EngineFailed(f"{url} can't be reached: {error}") from error
    if usage is None or first_s is None:
        raise EngineFailed(f"{url} sent no usage; it must honour stream_options.include_usage.")
    return Sample(first_s, int(usage["prompt_tokens"]), int(usage["completion_tokens"]))


async def _model_name(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            return str(msgspec.json.decode(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise EngineFailed(f"{url} does not list its models: {error}") from error


async def compare(
    engines: dict[str, str], rounds: int, seed: int, cases: Sequence[Case]
) -> dict[str, dict[str, float]]:
    """Medians over the rounds: case -> engine -> measure. Raises EngineFailed."""
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        models = {name: await _model_name(session, url) for name, url in engines.items()}
        for name, url in engines.items():
            await run_case(session, url, models[name], CASES[0], seed - 1)  # warm-up
        found: dict[str, dict[str, float]] = {}
        for index, case in enumerate(cases):
            measures: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(rounds):
                order = list(engines) if turn % 2 == 0 else list(reversed(engines))
                for name in order:
                    value = await run_case(session, engines[name], models[name], case, seed + 97 * index + turn)
                    measures[name].append(value)
            found[case.name] = {name: statistics.median(values) for name, values in measures.items()}
            print(f"{case.name}: {found[case.name]}", file=sys.stderr)
    return found


def measured_limits() -> tuple[float, float]:
    """(bytes a second, float32 operations a second) of this process's cores. Raises EngineFailed without torch.

    In a process of its own: nothing here imports torch.
    """
    command = [sys.executable, "-m", "engine_worker.bench.limits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineFailed(f"the machine's limits could not be measured, which needs the worker's packages: {reason}")
    bandwidth, arithmetic = msgspec.json.decode(done.stdout)
    return bandwidth, arithmetic


def _words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def table(found: dict[str, dict[str, float]], limits: dict[str, float], cases: Sequence[Case]) -> Table:
    """Engines as columns; others with how often the first is faster. `limits`: case -> the machine's own limit."""
    names = list(next(iter(found.values())))
    made = Table("case", "unit", *names, *(f"{names[0]} / {name}" for name in names[1:]), "share of limit")
    units = {"output": "tok/s", "prefill": "tok/s", "ttft": "ms"}
    for case in cases:
        values = found[case.name]
        ratios = []
        for name in names[1:]:
            ratio = values[names[0]] / values[name]
            ratios.append(f"{1 / ratio if case.measure == 'ttft' else ratio:.2f}")
        share = f"{values[names[0]] / limits[case.name]:.0%}" if case.name in limits else ""
        made.add_row(case.name, units[case.measure], *(f"{values[n]:.1f}" for n in names), *ratios, share)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.engine_bench", description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="NAME=URL", help="engines to compare; the first is ours")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every engine at every case (default 3)")
    parser.add_argument("--cases", help="parts of the names of cases, separated by commas (default: all)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 100_000, help="of the prompts (default: the clock)"
    )
    parser.add_argument("--model-bytes", type=float, help="bytes of weights, for the share of the bandwidth limit")
    parser.add_argument("--model-params", type=float, help="parameters, for the share of the arithmetic limit")
    args = parser.parse_args(argv)
    pairs = [text.partition("=") for text in args.engines]
    if any(not name or not url for name, _, url in pairs):
        parser.error("write engines as NAME=URL, such as ours=http://127.0.0.1:8101")
    wanted = args.cases.split(",") if args.cases else [""]
    cases = [case for case in CASES if any(part in case.name for part in wanted)]
    if not cases:
        parser.error(f"no case has {args.cases!r} in its name; there are: {'; '.join(case.name for case in CASES)}")
    limits: dict[str, float] = {}
    try:
        if args.model_bytes or args.model_params:
            bandwidth, arithmetic = measured_limits()
            print(f"measured: {bandwidth / 1e9:.1f} GB/s, {arithmetic / 1e9:.0f} GFLOP/s", file=sys.stderr)
            if args.model_bytes:
                limits["decode, 1 request"] = bandwidth / args.model_bytes
            if args.model_params:
                limits["prefill, 900 tokens"] = arithmetic / (2 * args.model_params)
        engines = {name: url.rstrip("/") for name, _, url in pairs}
        found = asyncio.run(compare(engines, args.rounds, args.seed, cases))
    except EngineFailed as error:
        print(f"engine_bench: {error}", file=sys.stderr)
        return 1
    Console().print(table(found, limits, cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
