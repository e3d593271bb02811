"""The clients: the simulator's workload, sent over HTTP. Open loop or closed, at the same moments for every gateway."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from loadtest.fleet.text import Wording
from loadtest.fleet.wall import WallClock
from loadtest.sim.job import Job, JobStatus
from loadtest.sim.setup import Load
from loadtest.sim.trace import Trace, TraceRequest
from loadtest.sim.workload import Workload

TIMEOUT_S = 600.0


class Speech(Protocol):
    """How a trace's request is said to an API. `scale`: tokens of the trace to one of the API's."""

    api: str
    scale: int

    def body(self, request: TraceRequest, unique: str) -> dict[str, Any]: ...

    def num_prompt_tokens(self, request: TraceRequest) -> int: ...


class ChatSpeech:
    """A chat of one message, in the words of text.py."""

    api = "/v1/chat/completions"

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self.scale = wording.compress

    def body(self, request: TraceRequest, unique: str) -> dict[str, Any]:
        prompt = self._wording.prompt(request, unique)
        return {"messages": [{"role": "user", "content": prompt}], "max_tokens": self._wording.output_words(request)}

    def num_prompt_tokens(self, request: TraceRequest) -> int:
        return self._wording.num_words(request)


@dataclass(slots=True)
class Replayed:
    """Jobs in the order sent, with times in the trace's seconds; how late they were sent."""

    jobs: list[Job]
    lags_s: Any


class Driver:
    """Replays `trace` (as words can say it) against one gateway, or several in turns. Use it once."""

    def __init__(
        self,
        base_urls: Sequence[str],
        model: str,
        trace: Trace,
        load: Load,
        speech: Speech,
        speedup: float,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._base_urls = base_urls
        self._model = model
        self._trace = trace
        self._load = load
        self._speech = speech
        self._speedup = speedup
        self._seed = seed
        self._progress = progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: list[Job] = []
        self._fault: BaseException | None = None

    async def run(self) -> Replayed:
        """To the last answer."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            self._clock = WallClock(self._speedup)
            self._changed = asyncio.Event()
            self._clock.on_ran = self._changed.set  # the workload may be over with nothing under way
            rng = random.Random(f"{self._seed}/arrivals")
            self._workload = Workload(self._clock, self._trace, self._load, rng, self._send)
            try:
                while not self._is_over():
                    await self._changed.wait()
                    self._changed.clear()
                    if self._fault is not None:
                        raise self._fault
            finally:
                self._clock.close()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        return Replayed(self._jobs, self._clock.lags_s)

    def _is_over(self) -> bool:
        sent_all = self._workload.is_over or len(self._jobs) == self._trace.num_requests
        return sent_all and not self._tasks

    def _send(self, request: TraceRequest, user: int) -> None:
        job = Job(str(len(self._jobs)), request, (), self._clock.now, user)
        self._jobs.append(job)
        task = asyncio.create_task(self._ask(job))
        self._tasks.add(task)
        task.add_done_callback(self._asked)
        if self._progress is not None:
            self._progress(len(self._jobs))

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and self._fault is None:
            self._fault = task.exception()

    async def _ask(self, job: Job) -> None:
        """A failure of any kind is a job with a reason."""
        body = {
            "model": self._model,
            **self._speech.body(job.trace, f"{self._seed}/{job.job_id}"),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        url = self._base_urls[int(job.job_id) % len(self._base_urls)] + self._speech.api
        # Its own moment, not the one it was due: what this process was late is the gateway's fault in no way.
        job.arrived_at = self._clock.read()
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                if response.status != 200:
                    text = (await response.read()).decode("utf-8", "replace")
                    raise _Refused(f"{response.status}: {text[:300]}")
                await self._read(job, response.content)
            job.status = JobStatus.DONE
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, _Refused) as error:
            job.status, job.reason = JobStatus.FAILED, f"{type(error).__name__}: {error}"
        job.finished_at = self._clock.read()
        self._clock.sync()
        self._workload.answered(job.user)

    async def _read(self, job: Job, lines: aiohttp.StreamReader) -> None:
        usage, done = None, False
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise _Refused(str(chunk["error"])[:300])
            if job.first_token_at is None and any(map(_has_token, chunk["choices"])):
                job.first_token_at = self._clock.read()
            usage = chunk.get("usage") or usage
        if not done or job.first_token_at is None or usage is None:
            raise _Refused("the stream ended without a token, its usage or [DONE]")
        expected = self._speech.num_prompt_tokens(job.trace)
        if usage["prompt_tokens"] != expected:
            raise _Refused(f"{usage['prompt_tokens']} prompt tokens arrived of {expected}")
        details = usage.get("prompt_tokens_details") or {}
        job.cached_tokens = (details.get("cached_tokens") or 0) * self._speech.scale


def _has_token(choice: dict[str, Any]) -> bool:
    """A chat's first chunk may hold the role alone. A plain completion's holds a token, whatever its text."""
    return "text" in choice or bool(choice["delta"].get("content"))


class _Refused(Exception):
    """The gateway's answer is none."""
