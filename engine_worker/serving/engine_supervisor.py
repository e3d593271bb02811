"""Keeps an engine process alive: starts it, passes its messages on, notices its death, starts the next one.

Each life has a random incarnation id and a socket pair of its own (pipe.py), so nothing of an earlier life can be
mistaken for news of this one. Another incarnation means an empty cache, which the gateway must know.

A first load that fails ends the worker with a sentence: the configuration is wrong, and trying again would not mend it.
Later deaths are met with a restart after a pause that doubles, up to half a minute, and starts over after a life that
went well. An endlessly computing engine is killed after `STALL_S` without news while calls wait for it, a stopped one
after as long without a heartbeat. Long before that, after SILENT_S, it does not count as healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable

import msgspec

from engine_worker.config import EngineConfig
from engine_worker.contract.errors import ApiError
from engine_worker.serving.engine_client import EngineClient
from engine_worker.serving.messages import (
    Beat,
    FromEngine,
    LoadFailed,
    Progress,
    Ready,
    Shutdown,
    StartOrder,
    Step,
    ToEngine,
)
from engine_worker.serving.pipe import APISide

logger = logging.getLogger("warmgate.worker")

STALL_S = 300.0
SILENT_S = 6.0  # without a heartbeat; several of BEAT_S, because a busy machine delays them
_GRACE_S = 0.25  # for a beat that has come but was not read yet
STOP_S = 5.0  # how long a process gets to end by itself before it is killed
_LAST_WORDS_S = 1.0  # how long what a process said before it died may take to be read
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_GOOD_LIFE_S = 60.0


class WorkerFailed(Exception):
    """The worker can't serve. The message is for the operator."""


class EngineSupervisor:
    """`run` until `stop`. `on_ready` gets each life's Ready; `on_step` each Step; `on_lost` is told of a life's end."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        *,
        loader: str,
        check_invariants: bool = False,
        on_ready: Callable[[Ready], None],
        on_step: Callable[[Step], None],
        on_lost: Callable[[], None],
        stall_s: float = STALL_S,
    ) -> None:
        self._config = config
        self._client = client
        self._loader = loader
        self._check_invariants = check_invariants
        self._on_ready = on_ready
        self._on_step = on_step
        self._on_lost = on_lost
        self._stall_s = stall_s
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: APISide | None = None
        self._load_failure: str | None = None
        self._last_beat_s = 0.0
        self.ready: Ready | None = None  # of the present life
        self.incarnation = ""
        self.detail = "starting"

    async def is_silent(self) -> bool:
        """Whether the engine's heartbeat has stopped: the process is stopped, or gets no time to run."""
        if self.ready is not None and time.monotonic() - self._last_beat_s > SILENT_S:
            await asyncio.sleep(_GRACE_S)
            return self.ready is not None and time.monotonic() - self._last_beat_s > SILENT_S
        return False

    async def run(self) -> None:
        """Lives, one after the other. Returns after `stop`. Raises WorkerFailed where the first load fails."""
        was_ready = False
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            started_s = time.monotonic()
            was_ready = await self._live() or was_ready
            if self._stopping:
                return
            reason = self._load_failure or self._death()
            if not was_ready:
                raise WorkerFailed(reason)
            if time.monotonic() - started_s > _GOOD_LIFE_S:
                pause_s = _FIRST_PAUSE_S
            self.detail = f"{reason.rstrip('.')}; starting it again in {pause_s:.1f} s"
            logger.error("%s", self.detail)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def stop(self) -> None:
        """End the process, by force if it takes long. `run` returns after it."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if self._pipe is not None and self.ready is not None:
            self._send(Shutdown())
        else:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _live(self) -> bool:
        """One life, from start to end. True if it became ready."""
        self.incarnation = uuid.uuid4().hex
        self._load_failure = None
        self._pipe, theirs = await APISide.open(self._take)
        try:
            with theirs:
                self._process = await self._start(theirs.fileno())
            await self._until_death(self._pipe, self._process)
            return self.ready is not None
        finally:
            self._end_of_life()
            self._pipe.close()
            self._pipe = None

    async def _start(self, descriptor: int) -> asyncio.subprocess.Process:
        order = StartOrder(
            config=self._config,
            loader=self._loader,
            descriptor=descriptor,
            check_invariants=self._check_invariants,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine_worker.serving.engine_process",
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            start_new_session=True,  # signals to our group (Ctrl-C, a service manager's stop) are ours to handle
            env={key: value for key, value in os.environ.items() if key != "WARMGATE_SECRET"},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")  # and the pipe stays open, see engine_process
        return process

    async def _until_death(self, pipe: APISide, process: asyncio.subprocess.Process) -> None:
        watchdog = asyncio.create_task(self._watch())
        death = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((death, pipe.ended), return_when=asyncio.FIRST_COMPLETED)
            if pipe.ended.done() and pipe.ended.exception() is not None:  # our own bug, or a message we can't read
                self.kill()
            await death
            await asyncio.wait((pipe.ended,), timeout=_LAST_WORDS_S)  # what it said before it died
            if pipe.ended.done():
                pipe.ended.result()
        finally:
            for task in (death, watchdog):
                task.cancel()
            await asyncio.gather(death, watchdog, return_exceptions=True)
            if process.returncode is None:  # we are being cancelled
                self.kill()
                await process.wait()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Step():
                self._client.deliver(message)
                self._on_step(message)
            case Progress(detail=detail):
                self.detail = detail
                logger.info("%s", detail)
            case Beat():
                self._last_beat_s = time.monotonic()
            case Ready():
                self._last_beat_s = time.monotonic()
                self.ready = message
                self.detail = ""
                self._on_ready(message)
                self._client.connect(self._send)
            case LoadFailed(message=sentence):
                self._load_failure = sentence

    def _send(self, message: ToEngine) -> None:
        if self._pipe is not None:
            self._pipe.send(message)

    async def _watch(self) -> None:
        """Kill an engine that gives no news although calls are in flight, or no sign of life at all."""
        while True:
            await asyncio.sleep(self._stall_s / 20)
            if self.ready is not None and time.monotonic() - self._last_beat_s > max(self._stall_s, SILENT_S):
                logger.error("the engine has shown no sign of life for %.0f s; killing it", self._stall_s)
                self.kill()
            if self._client.num_in_flight and time.monotonic() - self._client.last_news_s > self._stall_s:
                logger.error("the engine has given no news for %.0f s; killing it", self._stall_s)
                self.kill()

    def _end_of_life(self) -> None:
        was_ready, self.ready = self.ready is not None, None
        self._client.lose(
            ApiError(
                503,
                "The engine process has ended; it is being started again. Try again in a moment.",
                code="engine_restarting",
                retry_after_s=5,
            )
        )
        if was_ready:
            self._on_lost()

    def _death(self) -> str:
        code = self._process.returncode if self._process else None
        if code is not None and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"The engine process was ended by {signal.Signals(-code).name}{hint}."
        return f"The engine process ended with exit code {code}."
