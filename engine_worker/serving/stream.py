"""One streamed answer, from its first token to its last event.

Until the first choice's first token nothing is written, so that a failure keeps its status. From then on a stream has
one event a step to write, beside as many others as the batch has. Waking a task for each, with a time-out around its
waiting and another around its writing, costs several times what the event itself does. So while the client reads and
nothing ends, the step's news are made into events and handed to the socket right where they come in (`_pass_on`), and
the task sleeps. It is woken for everything else: an end, a failure, a client that reads more slowly than we write, and
to send a ping where nothing was written for PING_S.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from engine_worker.contract.errors import ApiError
from engine_worker.serving import sse
from engine_worker.serving.detokenizer import Piece
from engine_worker.serving.engine_client import Call, News
from engine_worker.serving.http import ClientGone, Exchange
from engine_worker.serving.replies import Reply

if TYPE_CHECKING:
    from engine_worker.serving.generate import Generation

logger = logging.getLogger("warmgate.worker")

PING_S = 15.0


class Stream:
    """`is_opened`: the answer's opening was sent elsewhere."""

    def __init__(
        self, exchange: Exchange, generation: Generation, call: Call, reply: Reply, is_opened: bool = False
    ) -> None:
        self._exchange = exchange
        self._generation = generation
        self._call = call
        self._reply = reply
        self._num_opened = 1 if is_opened else 0
        marks = generation.marks
        self._frames, self._ping = (sse.frames, sse.PING) if marks is None else (marks.frames, marks.ping())
        self._failure: Exception | None = None  # of `_pass_on`, for the task
        self._written_s = 0.0  # by the loop's clock
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """The answer as it comes, from the first choice's first token on. Raises what comes before that."""
        generation, call = self._generation, self._call
        pieces: list[tuple[int, Piece]] = []
        while not any(index == 0 for index, _ in pieces):
            pieces += generation.take(call, await call.news())
        pieces.sort(key=lambda item: item[0] != 0)  # stable: the first choice's pieces lead
        await self._exchange.start(200, [*sse.HEADERS, *generation.headers()])
        try:
            while True:
                payloads = self._payloads(pieces)
                if generation.is_finished:
                    closing = self._reply.closing(generation.usage)
                    await self._exchange.end(sse.frames([*payloads, *closing]) + sse.DONE)
                    return
                if payloads:
                    await self._exchange.write(self._frames(payloads))
                pieces = generation.take(call, await self._next())
        except ClientGone:
            raise
        except Exception as error:
            generation.failed()
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = ApiError(500, "The worker failed in the middle of this answer; its log says why.")
            await self._exchange.end(sse.error_event(error))

    def _payloads(self, pieces: list[tuple[int, Piece]]) -> list[bytes]:
        payloads: list[bytes] = []
        marks = self._generation.marks
        for index, piece in pieces:
            made = [] if piece.is_empty else self._reply.chunks(index, piece)
            if index >= self._num_opened:
                for due in range(self._num_opened, index + 1):  # a choice never begins before those ahead of it
                    payloads += self._reply.opening(due, has_text=due == index and bool(made))
                self._num_opened = index + 1
            payloads += made
            if marks is not None:
                marks.passed(bool(made))
        return payloads

    async def _next(self) -> News:
        """The next news that the task must see to; none if the answer has come to its end meanwhile."""
        self._written_s = self._loop.time()
        self._call.listen(self._pass_on)
        try:
            while not self._generation.is_finished and self._failure is None:
                news = self._call.take()
                if news:
                    return news
                await self._woken()
        finally:
            self._call.listen(None)
        if self._failure is not None:
            raise self._failure
        return []

    async def _woken(self) -> None:
        """Sends pings meanwhile."""
        while True:
            try:
                async with asyncio.timeout_at(self._written_s + PING_S):
                    return await self._call.woken()
            except TimeoutError:
                if self._loop.time() >= self._written_s + PING_S:
                    await self._exchange.write(self._ping)
                    self._written_s = self._loop.time()

    def _pass_on(self, news: News) -> bool:
        """Make a step's news into events and write them now. False leaves them, or what follows, to the task."""
        if not self._exchange.can_write_now:
            return False
        for _, update in news:
            if update.finish_reason is not None:
                return False
        try:
            payloads = self._payloads(self._generation.take(self._call, news))
            if payloads:
                self._exchange.write_now(self._frames(payloads))
                self._written_s = self._loop.time()
        except Exception as error:  # whoever brings the news must not suffer from it
            self._failure = error
        if self._failure is not None or self._generation.is_finished:
            self._call.wake()
        return True
