"""What a warm prefix is worth: TTFT of a prompt of about 900 tokens, cold and then warm, against any OpenAI base URL.

    python -m loadtest.warm_prefix http://127.0.0.1:8000 [--model M] [--words 880] [--rounds 5]

Every round draws a new prefix (cold by construction), asks once, and asks again with another question behind the same
prefix. Rounds run one request at a time, so nothing but the prefix differs. The median of the rounds' ratios counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.client import chat
from loadtest.conversations import prose
from loadtest.records import Record


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.warm_prefix", description=__doc__.split("\n")[0])
    parser.add_argument("url", help="base URL, without /v1")
    parser.add_argument("--model", default="", help="default: the first that /v1/models lists")
    parser.add_argument("--words", type=int, default=880)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options = parser.parse_args(arguments)
    try:
        pairs = asyncio.run(_measure(options))
    except (httpx.HTTPError, RuntimeError) as problem:
        print(f"{options.url}: {problem}", file=sys.stderr)
        return 1
    Console().print(table(pairs))
    return 0


async def _measure(options: argparse.Namespace) -> list[tuple[Record, Record]]:
    rng = random.Random(options.seed)
    pairs: list[tuple[Record, Record]] = []
    async with httpx.AsyncClient(base_url=options.url, timeout=300.0, trust_env=False) as client:
        model = options.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        await chat(client, model, [{"role": "user", "content": "Hello"}], 2)  # connections and first-use costs
        for number in range(options.rounds):
            system = {"role": "system", "content": f"Case {rng.getrandbits(64)}. {prose(rng, options.words)}"}
            asked: list[Record] = []
            for question in ("What is it about?", "Who is in it?"):
                asked.append(await chat(client, model, [system, {"role": "user", "content": question}], 2, number))
                if asked[-1].error:
                    raise RuntimeError(asked[-1].error)
            pairs.append((asked[0], asked[1]))
    return pairs


def table(pairs: list[tuple[Record, Record]]) -> Table:
    shown = Table(title="One prefix, cold and warm")
    for name in ("round", "prompt tokens", "cached", "TTFT cold", "TTFT warm", "cold / warm"):
        shown.add_column(name, justify="right")
    for number, (cold, warm) in enumerate(pairs, start=1):
        shown.add_row(
            *(str(number), str(warm.prompt_tokens), str(warm.cached_tokens)),
            *(f"{cold.ttft_s * 1000:,.0f} ms", f"{warm.ttft_s * 1000:,.0f} ms", f"{ratio(cold, warm):.1f}x"),
        )
    cold_s, warm_s = (statistics.median(pair[side].ttft_s for pair in pairs) for side in (0, 1))
    median_ratio = statistics.median(ratio(cold, warm) for cold, warm in pairs)
    shown.add_section()
    shown.add_row("median", "", "", f"{cold_s * 1000:,.0f} ms", f"{warm_s * 1000:,.0f} ms", f"{median_ratio:.1f}x")
    return shown


def ratio(cold: Record, warm: Record) -> float:
    assert cold.ttft_s is not None
    assert warm.ttft_s is not None
    return cold.ttft_s / warm.ttft_s


if __name__ == "__main__":
    sys.exit(main())
