"""The client's protocol with a door to the straight way (straight.py), for requests in whose heads nothing is unusual.

Such a request is offered there when its body is whole. One whose body comes in pieces goes the general way, which has
bounds and times for that; only where the head came alone, as most clients send it, the body is waited for a moment.
A head that came before on the same connection is not parsed again (known_head.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gateway.heads import Head, plain_head
from gateway.http_protocol import GatewayProtocol
from gateway.known_head import HeadMemory

if TYPE_CHECKING:
    from gateway.straight_run import Run

BODY_WAIT_S = 1.0


class PlainProtocol(GatewayProtocol):
    """The application says in `straight` whether there is such a way."""

    _plain: Head | None = None  # of a request whose body is on its way
    _parts: list[bytes] = []  # noqa: RUF012  # each request has its own
    _held = b""  # a known head whose body is on its way, and that the parser has not seen
    _parsed: Head | None = None  # the last one of a read
    _body_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._memory: HeadMemory[Head] = HeadMemory()

    # What the socket says

    def data_received(self, data: bytes) -> None:
        memory = self._memory
        if self._held:
            if len(data) == memory.length and (straight := getattr(self.app, "straight", None)) is not None:
                self._held = b""
                self._stop_waiting()
                straight.begin(self, memory.facts, data)
                return
            self._unhold()
        elif self._is_between_requests():
            begin = memory.recall(data)
            if begin and self._took_known(data, begin):
                return
            self._parsed = None
            self._parse(data)
            head = self._parsed
            if head is not None and self._plain is None:
                memory.learn(data, len(head.headers), head.length, head)
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._plain is not None:
            if self._parts:
                self._go_general_way()
            elif self._body_timer is None:
                self._body_timer = self.loop.call_later(BODY_WAIT_S, self._go_general_way)

    def _is_between_requests(self) -> bool:
        cycle = self.cycle
        return (
            (cycle is None or (cycle.response_complete and not cycle.more_body))
            and self._plain is None
            and not self._in_head
            and self._linger_timer is None
        )

    def _took_known(self, data: bytes, begin: int) -> bool:
        """A known head, behind which the body begins in `data`. False where the parser is needed nevertheless."""
        memory, straight = self._memory, getattr(self.app, "straight", None)
        if straight is None or not 0 < memory.length <= straight.max_body_bytes:
            return False
        size = len(data) - begin
        if size == memory.length:
            self._active_at = self.loop.time()
            straight.begin(self, memory.facts, data[begin:])
        elif size == 0:
            self._active_at = self.loop.time()
            self._held = data
            self._body_timer = self.loop.call_later(BODY_WAIT_S, self._go_general_way)
        else:
            return False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_general_way()  # there it is noted that its client left
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._go_general_way()
        super().shutdown()

    # What the parser says

    def on_headers_complete(self) -> None:
        straight = getattr(self.app, "straight", None)
        parser = self.parser
        if (
            straight is None
            or self._is_repeating
            or not (self.cycle is None or self.cycle.response_complete)
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
        ):
            super().on_headers_complete()
            return
        head = plain_head(self.url, self.headers, parser.should_keep_alive(), straight.max_body_bytes)
        if head is None:
            super().on_headers_complete()
            return
        self._in_head = False
        self._plain = self._parsed = head
        self._parts = []

    def on_body(self, body: bytes) -> None:
        if self._plain is None:
            super().on_body(body)
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        head, straight = self._plain, getattr(self.app, "straight", None)
        if head is None or straight is None:
            self._go_general_way()
            super().on_message_complete()
            return
        self._plain = None
        self._stop_waiting()
        parts = self._parts
        straight.begin(self, head, parts[0] if len(parts) == 1 else b"".join(parts))

    # Waiting for a body

    def _unhold(self) -> None:
        """Let the parser see what it has not seen."""
        held, self._held = self._held, b""
        self._stop_waiting()
        super().data_received(held)

    def _go_general_way(self) -> None:
        """Wait no more for the body that is on its way, if one is."""
        if self._held:
            self._unhold()
        head = self._plain
        if head is None:
            return
        self._plain = None
        self._stop_waiting()
        cycle = self.cycle = self._new_cycle("POST", head.url, head.headers, "1.1", head.keep_alive)
        cycle.body += b"".join(self._parts)
        if cycle.body:
            cycle.message_event.set()
        self._start_asgi_task(cycle, self.app)

    def _stop_waiting(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    # What a run on the straight way says

    def take_turn(self, run: Run) -> None:
        """It is being answered: `run` hears when the client leaves, and when the server shuts down."""
        turn: Any = run
        self.cycle = turn
        self._connection.cycle = turn
        self._connection.on_gone = run.gone
        self.tasks.add(turn)

    def end_turn(self, run: Run) -> None:
        turn: Any = run
        self.tasks.discard(turn)
        self._connection.on_gone = None

    def hand_over(self, run: Run, head: Head, app: Any) -> None:
        """`app` goes on with the request of `run`, as an ASGI application."""
        cycle = self._new_cycle("POST", head.url, head.headers, "1.1", run.keep_alive)
        cycle.more_body = False
        cycle.disconnected = run.disconnected
        cycle.response_started = run.response_started
        turn: Any = run
        if self.cycle is turn:  # else the next request has been read already
            self.cycle = cycle
        self._start_asgi_task(cycle, app)

    def close_turn(self) -> None:
        """The answer was the connection's last one."""
        self._close()
