"""The API process's view of the engine: calls in flight, and the news that arrive for them.

A `Call` is one API request: one or more sequences in the engine. Every way out of a call (done, error, cancelled, the
engine died) goes through `close`, which cancels in the engine exactly those sequences that have not ended there. News
for a sequence that is closed here are dropped: the engine may be a step ahead of a cancel.

Nothing here awaits the network: the supervisor feeds `deliver` and `lose`, and gives `send`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from engine_worker.contract.errors import ApiError
from engine_worker.serving.messages import Add, Cancel, Sequence, Stats, Step, ToEngine, Update
from engine_worker.serving.prepare import PreparedCall

MAX_SEQUENCES_IN_FLIGHT = 8192

News = list[tuple[int, Update]]  # (sequence, update), in order


class Call:
    """One API request in the engine. Sequence i is choice i % n of prompt i // n. Use as a context manager."""

    def __init__(self, client: EngineClient, request_ids: list[str]) -> None:
        self._client = client
        self._index = {request_id: i for i, request_id in enumerate(request_ids)}
        self._ids = request_ids
        self._open = set(self._ids)  # not ended in the engine, as far as known here
        self._news: News = []
        self._error: ApiError | None = None
        self._wake = asyncio.Event()
        self._listener: Callable[[News], bool] | None = None

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def news(self) -> News:
        """All that has arrived, at least one. Raises ApiError when the engine is lost."""
        while not (news := self.take()):
            await self.woken()
        return news

    def take(self) -> News:
        """All that has arrived. Raises ApiError when that is nothing and the engine is lost."""
        if not self._news and self._error is not None:
            raise self._error
        news, self._news = self._news, []
        return news

    async def woken(self) -> None:
        """Until something has arrived that no listener took, or the engine is lost, or `wake` was called."""
        await self._wake.wait()
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def listen(self, listener: Callable[[News], bool] | None) -> None:
        """Hand each step's news to `listener` as they come. What it returns False for is left to `take`, and so is
        all that comes after it. It must not raise."""
        self._listener = listener

    def finish(self, index: int) -> None:
        """This sequence needs no more tokens (a stop string ended it)."""
        self._client._cancel(self, [self._ids[index]])

    def close(self) -> None:
        self._client._cancel(self, [request_id for request_id in self._ids if request_id in self._open])

    def _deliver(self, update: Update) -> None:
        """Call `_announce` once after all of a step's updates."""
        self._news.append((self._index[update.request_id], update))
        if update.finish_reason is not None:
            self._open.discard(update.request_id)

    def _announce(self) -> None:
        if self._listener is not None:
            if self._listener(self._news):
                self._news = []
                return
            self._listener = None
        self._wake.set()

    def _fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._wake.set()


class EngineClient:
    """All calls in flight. `send` is None while there is no engine to send to."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}  # request id -> call, for open sequences
        self._ids = itertools.count()
        self._send: Callable[[ToEngine], None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.stats = Stats()
        self.refusal: ApiError | None = None  # why new calls are refused, while they are
        self.last_news_s = time.monotonic()

    @property
    def num_in_flight(self) -> int:
        return len(self._calls)

    async def wait_idle(self) -> None:
        """Until no sequence is in flight."""
        await self._idle.wait()

    def submit(self, prepared: PreparedCall, work_s: float = 0.0) -> Call:
        """Hand a request to the engine; `work_s` orders it there (contract/work.py).

        Raises ApiError 503 without an engine, 429 when too much is in flight.
        """
        if self.refusal is not None:
            raise self.refusal
        if self._send is None:
            raise ApiError(503, "The model is still loading.", code="engine_not_ready", retry_after_s=5)
        if self.num_in_flight + len(prepared.prompts) * prepared.n > MAX_SEQUENCES_IN_FLIGHT:
            raise ApiError(429, "Too many requests are waiting here.", code="queue_full", retry_after_s=2)
        sequences = list(self._sequences(prepared, work_s))
        request_ids = [name for one in sequences for name in (one.request_id, *(choice for choice, _ in one.choices))]
        call = Call(self, request_ids)
        if not self._calls:
            self.last_news_s = time.monotonic()
        for request_id in request_ids:
            self._calls[request_id] = call
        self._idle.clear()
        self._send(Add(sequences))
        return call

    def _sequences(self, prepared: PreparedCall, work_s: float) -> Iterator[Sequence]:
        """One for each prompt, with its other choices."""
        arrival_s = time.monotonic()
        for p, prompt_ids in enumerate(prepared.prompts):
            request_id, *others = (f"r{next(self._ids)}" for _ in range(prepared.n))
            choices = [(other, prepared.params_of(p, i).seed) for i, other in enumerate(others, start=1)]
            params = prepared.params_of(p, 0)
            yield Sequence(
                request_id, prompt_ids, params, arrival_s, prepared.salt, choices, prepared.output_ids, work_s
            )

    def connect(self, send: Callable[[ToEngine], None]) -> None:
        """The engine is ready."""
        self._send = send
        self.last_news_s = time.monotonic()

    def lose(self, error: ApiError) -> None:
        """The engine is gone: every call in flight ends with `error`."""
        self._send = None
        self.stats = Stats()
        self.fail_all(error)

    def fail_all(self, error: ApiError) -> None:
        """End every call in flight with `error`. What still runs in the engine is cancelled as the calls close."""
        for call in set(self._calls.values()):
            call._fail(error)

    def deliver(self, step: Step) -> None:
        self.stats = step.stats
        self.last_news_s = time.monotonic()
        touched: dict[Call, None] = {}
        for update in step.updates:
            call = self._calls.get(update.request_id)
            if call is None:
                continue
            if update.finish_reason is not None:
                self._forget(update.request_id)
            call._deliver(update)
            touched[call] = None
        for call in touched:
            call._announce()

    def _cancel(self, call: Call, request_ids: list[str]) -> None:
        running = [request_id for request_id in request_ids if request_id in call._open]
        for request_id in running:
            call._open.discard(request_id)
            self._forget(request_id)
        if running and self._send is not None:
            self._send(Cancel(running))

    def _forget(self, request_id: str) -> None:
        self._calls.pop(request_id, None)
        if not self._calls:
            self._idle.set()

    def check_invariants(self) -> None:
        for request_id, call in self._calls.items():
            assert request_id in call._open, f"{request_id} is registered and closed"
        assert self._idle.is_set() == (not self._calls), "idle flag disagrees with the calls in flight"
