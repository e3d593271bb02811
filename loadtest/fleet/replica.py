"""One fake replica: the engine's real scheduler and block pool under the service model, behind OpenAI's API.

Inside everything counts in the trace's tokens, outside in words (text.py). Of an answer's tokens the first is sent when
it is made and the others together with the last: what matters to a gateway, the moments and the usage, is all there,
and a machine with few cores can play a large fleet.

Two manners: as the bundled worker (state, tokenizer, cached tokens in a header; it serves the shortest first as it is
told, contract/work.py), or as vLLM (metrics, status line at once, cached tokens in the usage alone; first come, first
served). Both publish KV events; only the first says where. Steps are made alike in both (core/step.py), so what differs
between gateways is where they send what, and the order that they ask for.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from engine_worker.contract.errors import error_body
from engine_worker.core.limits import JOINT_PREFILL_TOKENS
from engine_worker.core.scheduler import RequestTooLarge
from engine_worker.core.types import BlockHash, Request, RequestUpdate, SamplingParams
from loadtest.fleet.kv_feed import KVFeed
from loadtest.fleet.text import Wording, token_ids
from loadtest.fleet.wall import WallClock, lag_row
from loadtest.sim.engine import Engine
from loadtest.sim.gpus import Gpu
from loadtest.sim.prompts import OUTPUT_ID, BlockName, PromptBook, SimKVCacheManager, SimRequest

Manner = Literal["warmgate", "vllm"]


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """`num_blocks` of the trace's size. `token_budget` and what follows but `manner`: the scheduler's limits
    (core/limits.py), in the trace's tokens."""

    name: str
    model: str
    gpu: Gpu
    num_blocks: int
    token_budget: int
    max_num_seqs: int
    manner: Manner
    joint_prefill_tokens: int = JOINT_PREFILL_TOKENS


class Lexicon:
    """Block texts met so far, numbered, and the names of the prefixes they make. One for all replicas of a process."""

    def __init__(self, wording: Wording) -> None:
        self.wording = wording
        self._book = PromptBook()
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def read(self, text: str) -> tuple[int, list[BlockName]]:
        """A prompt's length in words, and the names of its full blocks."""
        num_words, blocks = self.wording.cut(text)
        return num_words, self._book.names(tuple([self._number(block) for block in blocks]))

    def block_ids(self, number: int) -> Sequence[int]:
        """The token ids of a numbered block; of an answer's, zeros."""
        if number == OUTPUT_ID:
            return (0,) * self.wording.block_words
        return token_ids(self._texts[number])

    def _number(self, block: str) -> int:
        number = self._numbers.get(block)
        if number is None:
            number = self._numbers[block] = len(self._texts)
            self._texts.append(block)
        return number


class FakeKVCacheManager(SimKVCacheManager):
    """One number stands in for each block's tokens, for an answer's blocks, too."""

    def name_block(self, request: Request, index: int, parent: BlockHash) -> tuple[BlockHash, tuple[int, ...]]:
        block_hash, stand_in = super().name_block(request, index, parent)
        return block_hash, stand_in[:1]


@dataclass(slots=True)
class Play:
    """One request under way. The moments are the engine's, in seconds of the trace; None until they come."""

    request: SimRequest
    first: asyncio.Future[RequestUpdate]
    last: asyncio.Future[RequestUpdate]
    first_at: float | None = None
    last_at: float | None = None


@dataclass(slots=True)
class Counts:
    num_started: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    num_with_work: int = 0
    num_polls: int = 0
    num_output_tokens: int = 0
    unknown_paths: dict[str, int] = field(default_factory=dict)


class FakeReplica:
    """Lives on the running loop. Give its `app` (http.py) to a server."""

    def __init__(self, config: ReplicaConfig, clock: WallClock, lexicon: Lexicon, feed: KVFeed) -> None:
        self.config = config
        self.wording = lexicon.wording
        self.counts = Counts()
        self.feed = feed
        self.incarnation = secrets.token_hex(8)
        self.started_at = time.time()
        self._clock = clock
        self._lexicon = lexicon
        self._plays: dict[str, Play] = {}
        self._numbers = itertools.count(1)
        kv = FakeKVCacheManager(config.num_blocks, self.wording.block_tokens, enable_kv_events=True)
        self.engine = Engine(
            clock,
            config.gpu,
            kv,
            self._updated,
            self._publish,
            config.token_budget,
            config.max_num_seqs,
            joint_prefill_tokens=config.joint_prefill_tokens,
        )

    @property
    def step_words(self) -> int:
        """What a step computes at most, in words; at least one, since none would say "first come, first served"."""
        return max(self.config.token_budget // self.wording.compress, 1)

    @property
    def plays(self) -> list[Play]:
        """Requests under way."""
        return list(self._plays.values())

    def submit(self, prompt: str, num_output_words: int, work_s: float = 0.0) -> Play:
        """`work_s`: its prefill as the gateway expects it, in seconds of the wall, by which a gateway has measured.
        Raises RequestTooLarge."""
        now = self._clock.sync()
        num_words, names = self._lexicon.read(prompt)
        request = SimRequest(
            request_id=f"{self.config.name}-{next(self._numbers)}",
            prompt_ids=range(max(num_words, 1) * self.wording.compress),  # type: ignore[arg-type]
            params=SamplingParams(max_tokens=num_output_words * self.wording.compress),
            arrival_s=now,
            work_s=work_s * self._clock.speedup,
            names=names,
        )
        try:
            self.engine.submit(request)
        except RequestTooLarge:
            self.counts.num_refused += 1
            raise
        loop = asyncio.get_running_loop()
        play = self._plays[request.request_id] = Play(request, loop.create_future(), loop.create_future())
        self.counts.num_started += 1
        return play

    def cancel(self, play: Play) -> None:
        """The client has left. Nothing happens to one that is over."""
        if self._plays.pop(play.request.request_id, None) is not None:
            self._clock.sync()
            self.engine.cancel(play.request.request_id)
            self.counts.num_cancelled += 1
            play.first.cancel()
            play.last.cancel()

    def _updated(self, update: RequestUpdate) -> None:
        play = self._plays.get(update.request_id)
        if play is None:
            return
        if play.first_at is None:
            play.first_at = self._clock.now
            play.first.set_result(update)
        if update.finish_reason is not None:
            play.last_at = self._clock.now
            del self._plays[update.request_id]
            self.counts.num_finished += 1
            self.counts.num_output_tokens += len(play.request.output_ids)
            play.last.set_result(update)

    def _publish(self) -> None:
        self.feed.publish(self.engine.take_events())

    def usage(self, play: Play) -> dict[str, Any]:
        """In words, as the API tells it."""
        size = self.wording.compress
        prompt, output = len(play.request.prompt_ids) // size, -(-len(play.request.output_ids) // size)
        cached = (play.request.num_cached_tokens or 0) // size
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def stats(self) -> dict[str, Any]:
        """For the report, in the trace's tokens and seconds."""
        self._clock.sync()
        scheduler = self.engine.scheduler.stats()
        return {
            "name": self.config.name,
            "prompt_tokens": scheduler.prefix_cache_queries,
            "cached_tokens": scheduler.prefix_cache_hits,
            "num_preemptions": scheduler.num_preemptions,
            "busy_s": self.engine.busy_s,
            "now_s": self._clock.now,
            "num_started": self.counts.num_started,
            "num_finished": self.counts.num_finished,
            "num_cancelled": self.counts.num_cancelled,
            "num_refused": self.counts.num_refused,
            "num_with_work": self.counts.num_with_work,
            "num_polls": self.counts.num_polls,
            "unknown_paths": self.counts.unknown_paths,
            "lag": lag_row(self._clock.lags_s, "lag"),
        }


def refused(message: str) -> web.Response:
    body = error_body(message, "invalid_request_error", None, "context_length_exceeded")
    return web.Response(status=400, body=body, content_type="application/json")
