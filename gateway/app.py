"""The gateway as an ASGI application: hot routes are plain ASGI straight into the proxy, the others are starlette's.

Paths may start with a doubled slash or leave `/v1` out, as some clients' do; replicas always get the plain path.
"""

from __future__ import annotations

import contextlib
import re
import time

from starlette.applications import Starlette

from engine_worker.contract.errors import ApiError
from gateway.answer import Answer, Receive, Scope, Send, request_id
from gateway.config import GatewaySettings
from gateway.exchange import Failure
from gateway.observe.access_log import AccessLog
from gateway.observe.metrics import FleetGauges, Metrics, ReplicaGauges
from gateway.openai.parse import Endpoint
from gateway.prefix.service import PrefixService
from gateway.proxy import Proxy
from gateway.replicas.cuts import CutMaker
from gateway.replicas.health import Monitor
from gateway.replicas.registry import Registry, Replica
from gateway.router import Router
from gateway.routes import cold_routes
from gateway.upstream import Upstream
from policies.events import FailureKind
from policies.fleet import FleetState
from policies.registry import fleet_config, make_policy
from policies.types import ReplicaStatus

_SLASHES = re.compile(r"/{2,}")

# The gateway's path -> what it is, and the replica's path for it.
HOT_ROUTES: dict[str, tuple[Endpoint, str]] = {
    "/v1/chat/completions": ("chat", "/v1/chat/completions"),
    "/v1/completions": ("completions", "/v1/completions"),
    "/v1/embeddings": ("embeddings", "/v1/embeddings"),
    "/chat/completions": ("chat", "/v1/chat/completions"),
    "/completions": ("completions", "/v1/completions"),
    "/embeddings": ("embeddings", "/v1/embeddings"),
    "/tokenize": ("tokenize", "/tokenize"),
    "/detokenize": ("detokenize", "/detokenize"),
}


class Gateway:
    """The ASGI application. Built without a loop; lives between lifespan's startup and shutdown.

    Raises policies.registry.UnknownPolicy and OSError (the access log's file) when built.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.metrics = Metrics(self._gauges)
        self.fleet = FleetState(fleet_config(settings.policy))
        policy = make_policy(settings.policy)
        self.router = Router(self.fleet, policy, self.metrics, settings.seed, hold=getattr(policy, "hold", None))
        self.registry = Registry(settings.replicas, self.router.emit, time.monotonic, self.metrics.replica_restarted)
        self.router.registry = self.registry
        self.access_log = AccessLog(settings.access_log)
        self.draining = False
        self._cold: Starlette = cold_routes(self)
        self._proxy: Proxy | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hot = HOT_ROUTES.get(scope["path"])
            if hot is None or scope["method"] != "POST":
                await self._other(scope, receive, send)
            else:
                await self._hot(scope, receive, send, *hot)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            raise RuntimeError(f"{scope['type']} connections are not served")

    async def _hot(self, scope: Scope, receive: Receive, send: Send, endpoint: Endpoint, path: str) -> None:
        assert self._proxy is not None, "requests come after lifespan's startup"
        await self._proxy(scope, receive, send, endpoint, path)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if "//" in path:
            path = _SLASHES.sub("/", path)
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogatepass")}
            hot = HOT_ROUTES.get(path)
            if hot is not None and scope["method"] == "POST":
                await self._hot(scope, receive, send, *hot)
                return
        if path in HOT_ROUTES:
            answer = Answer(scope, send)
            answer.headers = [(b"x-request-id", request_id(scope).encode("ascii")), (b"allow", b"POST, OPTIONS")]
            if scope["method"] == "OPTIONS":
                await answer.whole(204, [], b"")
                return
            error = ApiError(405, f"{scope['method']} is not allowed on {path}; use POST.", code="method_not_allowed")
            await answer.error(error)
            return
        await self._cold(scope, receive, send)

    @contextlib.asynccontextmanager
    async def running(self):  # type: ignore[no-untyped-def]
        """Everything that lives on the loop, from watchers to connections."""
        settings = self.settings
        prefix = PrefixService()
        upstream = Upstream(settings.connect_s, settings.max_connections_per_replica)
        cuts = CutMaker(prefix, self.metrics, self.router.emit, time.monotonic)
        monitor = Monitor(settings, self.registry, cuts)

        def on_trouble(replica: Replica, failure: Failure) -> None:
            monitor.trouble(replica, failure.kind is FailureKind.CONNECT, failure.log_text)

        self._proxy = Proxy(
            settings, self.registry, self.router, prefix, upstream, self.metrics, self.access_log, on_trouble
        )
        monitor.start()
        try:
            yield self
        finally:
            await monitor.close()
            await upstream.close()
            prefix.close()
            await self.access_log.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def _gauges(self) -> FleetGauges:
        now = time.monotonic()
        return FleetGauges(
            tuple(self._replica_gauges(replica, now) for replica in self.registry),
            self.router.stats.num_queued,
            self.router.stats.num_in_flight,
        )

    def _replica_gauges(self, replica: Replica, now: float) -> ReplicaGauges:
        if not replica.joined:
            return ReplicaGauges(replica.replica_id, ReplicaStatus.DOWN, 0, 0, 0, 0.0, 0, replica.key_mode, "none")
        stats = self.fleet.stats(replica.replica_id, now)
        return ReplicaGauges(
            replica.replica_id,
            stats.status,
            stats.num_waiting,
            stats.num_running,
            stats.queued_prefill_tokens,
            stats.kv_usage,
            stats.num_index_blocks,
            replica.key_mode,
            replica.kv_feed,
        )


def create_app(settings: GatewaySettings) -> Gateway:
    """Raises policies.registry.UnknownPolicy, and OSError when the access log's file can't be opened."""
    return Gateway(settings)
