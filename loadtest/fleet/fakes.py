"""The process that plays the whole fleet: `python -m loadtest.fleet.fakes`, started by the fleet's command.

It prints one line of JSON with the replicas' addresses when they listen, and ends when its standard input does, or on
SIGTERM. GET /fake/stats at a replica tells what it did, and how late this process was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from contextlib import AsyncExitStack

import zmq.asyncio
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from loadtest.fleet.http import make_app
from loadtest.fleet.kv_feed import KVFeed
from loadtest.fleet.replica import FakeReplica, Lexicon, ReplicaConfig
from loadtest.fleet.text import Wording
from loadtest.fleet.wall import WallClock
from loadtest.sim.gpus import TOKEN_BUDGET, parse_fleet

HOST = "127.0.0.1"


def is_ours_to_tell(record: logging.LogRecord) -> bool:
    """Some gateways try HTTP/2 first to find out whether a replica speaks gRPC: no error of anybody's."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


async def start_replicas(
    stack: AsyncExitStack, configs: list[ReplicaConfig], wording: Wording, clock: WallClock
) -> tuple[list[FakeReplica], list[str]]:
    """Replicas that listen until `stack` closes, and their base URLs."""
    lexicon = Lexicon(wording)
    context = zmq.asyncio.Context()
    stack.callback(context.destroy, linger=0)
    replicas, urls = [], []
    for config in configs:
        feed = KVFeed(context, HOST, wording.block_words, lexicon.block_ids)
        stack.push_async_callback(feed.close)
        replica = FakeReplica(config, clock, lexicon, feed)
        runner = web.AppRunner(make_app(replica), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, HOST, 0).start()
        replicas.append(replica)
        urls.append(f"http://{HOST}:{runner.addresses[0][1]}")
    return replicas, urls


def configs_of(options: argparse.Namespace) -> list[ReplicaConfig]:
    """Raises ValueError."""
    gpus = parse_fleet(options.gpu, options.replicas)
    blocks = options.blocks if len(options.blocks) > 1 else options.blocks * len(gpus)
    if len(blocks) != len(gpus):
        raise ValueError(f"--blocks has {len(blocks)} numbers for {len(gpus)} replicas")
    return [
        ReplicaConfig(
            f"r{index:02d}", options.model, gpu, size, options.token_budget, options.max_num_seqs, options.manner,
            options.joint_prefill_tokens,
        )
        for index, (gpu, size) in enumerate(zip(gpus, blocks, strict=True))
    ]  # fmt: skip


async def serve(options: argparse.Namespace) -> None:
    """Until standard input ends, or SIGTERM. Raises ValueError, OSError."""
    wording, configs = Wording(options.block_tokens, options.compress), configs_of(options)
    logging.getLogger("aiohttp.server").addFilter(is_ours_to_tell)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), lambda: stop.set() if not sys.stdin.buffer.read1(4096) else None)
    clock = WallClock(options.speedup)
    async with AsyncExitStack() as stack:
        stack.callback(clock.close)
        replicas, urls = await start_replicas(stack, configs, wording, clock)
        rows = [
            {"url": url, "kv_events": replica.feed.endpoint, "kv_events_replay": replica.feed.replay_endpoint}
            for url, replica in zip(urls, replicas, strict=True)
        ]
        print(json.dumps(rows), flush=True)
        await stop.wait()


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = argparse.ArgumentParser(prog="python -m loadtest.fleet.fakes", description=__doc__.splitlines()[0])
    p.add_argument("--replicas", type=int, default=8)
    p.add_argument("--gpu", default="h100")
    p.add_argument("--blocks", type=int, nargs="+", required=True, help="KV blocks: one number, or one a replica")
    p.add_argument("--block-tokens", type=int, default=512)
    p.add_argument("--compress", type=int, default=16)
    p.add_argument("--speedup", type=float, default=1.0)
    p.add_argument("--manner", choices=("warmgate", "vllm"), default="vllm")
    p.add_argument("--model", default="fake")
    p.add_argument("--token-budget", type=int, default=TOKEN_BUDGET)
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--joint-prefill-tokens", type=int, default=JOINT_PREFILL_TOKENS)
    return p


def main(arguments: list[str] | None = None) -> int:
    """0 after a sign to end; 1, with a sentence on stderr, when it could not begin."""
    try:
        asyncio.run(serve(parser().parse_args(arguments)))
    except (ValueError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
