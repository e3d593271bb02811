"""The straight way of nearly every request whose answer comes in one piece: two callbacks and no task.

    the client's last byte  -> parse, admit, place, write to a replica's idle connection
    the replica's last byte -> end the lease, settle, write to the client

Theory. A task, the coroutines in it and the futures that it waits for cost as much as all that they are there for, as
long as nothing goes wrong and nothing is waited for but the one answer. So the usual case is done without them, by the
very functions that the general way (proxy.py) uses. Whatever is not the usual case goes on there, from where it is
(begun.py): a stream, a wait for a place or a connection, a long prompt that is cut in a thread, any failure, refusal or
interruption, a client that reads slowly. So this way has nothing of its own to say about any of those.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.admission import Admission
from gateway.config import GatewaySettings
from gateway.guard import wheel_of
from gateway.heads import Head
from gateway.prefix.service import PrefixService
from gateway.proxy import Proxy
from gateway.quarantine import Quarantine
from gateway.router import Router
from gateway.straight_run import Run
from gateway.tenancy.service import Tenancy
from gateway.upstream import Upstream
from gateway.upstream_connection import MAX_BUFFERED_BYTES

if TYPE_CHECKING:
    from gateway.plain_protocol import PlainProtocol

_MAX_BODY_BYTES = 256 * 1024


class Straight:
    """What all runs share. Built on the event loop."""

    def __init__(
        self, settings: GatewaySettings, proxy: Proxy, router: Router, prefix: PrefixService, upstream: Upstream,
        quarantine: Quarantine, admission: Admission, tenancy: Tenancy,
    ) -> None:  # fmt: skip
        self.proxy = proxy
        self.intake = proxy.intake
        self.router = router
        self.prefix = prefix
        self.upstream = upstream
        self.quarantine = quarantine
        self.admission = admission
        self.tenancy = tenancy
        self.request_s = settings.request_s
        self.max_body_bytes = min(settings.max_body_bytes, _MAX_BODY_BYTES)
        self.max_response_bytes = min(settings.max_response_bytes, MAX_BUFFERED_BYTES)
        self.loop = asyncio.get_running_loop()
        self.wheel = wheel_of(self.loop)

    def begin(self, protocol: PlainProtocol, head: Head, body: bytes) -> Run:
        """Serve a request whose body is here; the run has its turn on the connection from now on."""
        run = Run(self, protocol, head)
        protocol.take_turn(run)
        run.begin(body)
        return run
