"""The gateway as an ASGI application: hot routes are plain ASGI straight into the proxy, the others are starlette's.

Paths may start with a doubled slash, end in one, leave `/v1` out or have it twice, as some clients' do; replicas
always get the plain path. Other APIs (translate/) are routes like the others, with a translation on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from engine_worker.contract.errors import ApiError
from gateway import openness
from gateway.admin import follow
from gateway.admission import Admission, affordable_in_flight
from gateway.aliases import Aliases
from gateway.answer import Answer, Message, Receive, Scope, Send, request_id
from gateway.config import GatewaySettings
from gateway.exchange import Failure, Served
from gateway.observe.access_log import AccessLog
from gateway.observe.advice import ShadowCollector
from gateway.observe.lag import LoopWatch
from gateway.observe.metrics import FleetGauges, Metrics, ReplicaGauges
from gateway.observe.record import RequestRecord
from gateway.observe.shadow import Shadows
from gateway.observe.trace_file import TraceFile
from gateway.openai.fields import Endpoint, ParsedRequest
from gateway.prefix.service import PrefixService
from gateway.proxy import Proxy
from gateway.quarantine import Quarantine
from gateway.replicas.cuts import CutMaker
from gateway.replicas.health import Monitor
from gateway.replicas.hot_prompts import HotPrompts
from gateway.replicas.registry import Registry, Replica
from gateway.replicas.warmup import Warmer, WarmupCollector
from gateway.router import Lease, Router
from gateway.routes import cold_routes
from gateway.sharing.figures import SharingCollector
from gateway.straight import Straight
from gateway.tenancy.directory import Identity
from gateway.tenancy.figures import TenantCollector
from gateway.tenancy.service import Tenancy
from gateway.translate.answer import Translation
from gateway.translate.count import TokenCounter
from gateway.translate.messages import MessagesTranslation
from gateway.translate.responses import ResponsesTranslation
from gateway.translate.store import ResponseStore
from gateway.upstream import Upstream
from policies.events import Event, FailureKind, Joined, StatsReported, StatusChanged
from policies.fleet import FleetState
from policies.registry import fleet_config, make_policy
from policies.types import ReplicaStatus
from policies.warm_queue import hold_of

if TYPE_CHECKING:
    from gateway.sharing.hub import Sharing
    from gateway.siblings import Siblings

_ROOM_EVENTS = (Joined, StatusChanged, StatsReported)
_SLASHES = re.compile(r"/{2,}")
_FIRST_POLLS_S = 2.0
_CORS_MAX_AGE_S = 24 * 3600
_EXPOSED = ("x-request-id", "request-id", "retry-after", "x-should-retry", "x-warmgate-replica", "x-warmgate-policy")
_EXPOSED_LIMITS = tuple(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
_EXPOSED_TOKENS = ("x-warmgate-matched-tokens", "x-warmgate-cached-tokens")


class HotRoute(NamedTuple):
    """What a path is: the kind of request that replicas get, their path for it, and the API that the client speaks."""

    endpoint: Endpoint
    path: str
    api: Literal["", "responses", "messages", "count_tokens"] = ""


_CHAT_PATH = "/v1/chat/completions"
HOT_ROUTES: dict[str, HotRoute] = {
    "/tokenize": HotRoute("tokenize", "/tokenize"),
    "/detokenize": HotRoute("detokenize", "/detokenize"),
}
for _name, _route in {
    "/chat/completions": HotRoute("chat", _CHAT_PATH),
    "/completions": HotRoute("completions", "/v1/completions"),
    "/embeddings": HotRoute("embeddings", "/v1/embeddings"),
    "/responses": HotRoute("chat", _CHAT_PATH, "responses"),
    "/messages": HotRoute("chat", _CHAT_PATH, "messages"),
    "/messages/count_tokens": HotRoute("tokenize", "/tokenize", "count_tokens"),
}.items():
    HOT_ROUTES[_name] = HOT_ROUTES["/v1" + _name] = _route


class Gateway:
    """The ASGI application. Built without a loop; lives between lifespan's startup and shutdown.

    Raises policies.registry.UnknownPolicy, KeysError, TraceFileError and OSError (the access log's file) when built.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.metrics = Metrics(self._gauges)
        self.fleet = FleetState(fleet_config(settings.policy))
        policy = make_policy(settings.policy)
        self.router = Router(self.fleet, policy, self.metrics, settings.seed, hold=hold_of(policy, self.fleet))
        self.registry = Registry(
            settings.replicas, self.router.emit, time.monotonic, self.metrics.replica_restarted, settings.slow_start_s,
            wants_apart=openness.has_keys(settings) and settings.unsalted_replicas == "refuse",
        )  # fmt: skip
        self.router.registry = self.registry
        self.access_log = AccessLog(settings.access_log)
        self.trace_file: TraceFile | None = None
        if settings.record_trace is not None:
            self.trace_file = TraceFile(settings.record_trace, settings.record_trace_bytes)
        self.draining = False
        self.tenancy = Tenancy(settings)
        self.metrics.registry.register(TenantCollector(self.tenancy.figures))
        self.admission = Admission(
            settings.max_in_flight or affordable_in_flight(), settings.max_queued, settings.queue_s, self._room()
        )
        self.router.listeners.append(self._more_room)
        if settings.shadow_policies:
            shadows = self.router.shadows = Shadows(settings.shadow_policies, settings.shadow_share, settings.seed)
            self.metrics.registry.register(ShadowCollector(shadows))
        self.siblings: Siblings | None = None
        self.sharing: Sharing | None = None
        if settings.redis_url is not None:
            from gateway.sharing.hub import Sharing  # seldom needed, and the client is slow to import

            self.sharing = Sharing(settings.redis_url.get_secret_value(), settings.fleet, self.router, self.registry)
            self.metrics.registry.register(SharingCollector(self.sharing.figures))
        self._cold: Starlette = cold_routes(self)
        self._proxy: Proxy | None = None
        self.straight: Straight | None = None  # for plain_protocol.py
        self.warmer: Warmer | None = None
        self._counter: TokenCounter | None = None
        self._aliases = Aliases(settings.model_aliases)
        self.responses = ResponseStore(settings.responses_store_bytes)
        self._serve: Any = self._dispatch
        if settings.allowed_origins:
            self._serve = CORSMiddleware(
                self._dispatch,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[*_EXPOSED, *_EXPOSED_TOKENS, *_EXPOSED_LIMITS],
                max_age=_CORS_MAX_AGE_S,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)

    def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """To be awaited at once. (Not a coroutine itself, nor is `_hot`: every request would pay for them.)"""
        if scope["type"] == "http":
            hot = HOT_ROUTES.get(scope["path"])
            if hot is None or scope["method"] != "POST":
                return self._other(scope, receive, send)
            return self._hot(scope, receive, send, hot)
        if scope["type"] == "lifespan":
            return self._lifespan(receive, send)
        raise RuntimeError(f"{scope['type']} connections are not served")

    def _hot(self, scope: Scope, receive: Receive, send: Send, route: HotRoute) -> Awaitable[None]:
        assert self._proxy is not None, "requests come after lifespan's startup"
        if not route.api:
            return self._proxy(scope, receive, send, route.endpoint, route.path)
        if route.api == "count_tokens":
            assert self._counter is not None
            return self._counter(scope, receive, send)
        translation = ResponsesTranslation(self.responses) if route.api == "responses" else MessagesTranslation()
        return self._proxy(scope, receive, send, route.endpoint, route.path, translation)

    def _room(self) -> Callable[[str], int] | None:
        """How many requests for a model the fleet should have at once, where anybody wants to know."""
        slots, registry = self.settings.replica_slots, self.registry
        if slots:
            return lambda model: slots * len(registry.ready(model))
        return None if self.tenancy.is_open else registry.num_slots

    def _more_room(self, event: Event) -> None:
        if self.admission.num_queued and isinstance(event, _ROOM_EVENTS):
            self.admission.pump()

    async def _count_by_replica(self, scope: Scope, receive: Receive, send: Send, translation: Translation) -> None:
        assert self._proxy is not None
        await self._proxy(scope, receive, send, "tokenize", "/tokenize", translation)

    def model_for(self, name: str) -> str:
        """The served model that `name` means. Raises ApiError where a request for it could not be placed."""
        model = self._aliases.resolve(name, self.registry.model_names)
        self.router.check_model(model, name)
        return model

    def drain(self, draining: bool) -> None:
        """Refuse new requests from now on, or take them again."""
        self.draining = draining
        self.admission.is_closed = draining

    def listed_models(self, identity: Identity | None = None) -> list[tuple[str, str]]:
        """Every name that may be asked for (by that key), with the model that it means."""
        served = self.registry.model_names
        names = [*((model, model) for model in sorted(served)), *self._aliases.listed(served)]
        return [pair for pair in names if identity is None or identity.may_use(*pair)]

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if "//" in path or path.startswith("/v1/v1/") or (path.endswith("/") and len(path) > 1):
            path = _SLASHES.sub("/", path).replace("/v1/v1/", "/v1/", 1).rstrip("/") or "/"
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogatepass")}
            hot = HOT_ROUTES.get(path)
            if hot is not None and scope["method"] == "POST":
                await self._hot(scope, receive, send, hot)
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
        given_id = request_id(scope).encode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and not any(
                h[0] == b"x-request-id" for h in message["headers"]
            ):
                message = {**message, "headers": [*message["headers"], (b"x-request-id", given_id)]}
            await send(message)

        await self._cold(scope, receive, send_with_id)

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

        quarantine = Quarantine(monitor.has_died, time.monotonic)
        self._proxy = Proxy(
            settings, self.registry, self.router, prefix, upstream, self.metrics, self.access_log, on_trouble,
            quarantine, self.admission, self.tenancy,
        )  # fmt: skip
        self.straight = Straight(
            settings, self._proxy, self.router, prefix, upstream, quarantine, self.admission, self.tenancy
        )
        prompts = HotPrompts(settings.warmup_store_bytes)
        warmer = self.warmer = Warmer(
            prompts, self.registry, self.router, prefix, upstream, settings.warmup_s, settings.handover_s
        )
        self.router.listeners.append(warmer.observe)
        self._proxy.on_served = self._on_served(warmer)
        if settings.warmup_store_bytes:
            self.metrics.registry.register(WarmupCollector(prompts, lambda: list(warmer.outcomes.items())))
        loop_watch = LoopWatch(self.metrics.loop_lag)
        self._counter = TokenCounter(
            prefix, self.registry, self.model_for, self._count_by_replica, settings.max_body_bytes, settings.body_s,
            self.tenancy,
        )  # fmt: skip
        if self.siblings is not None:
            follow(self, self.siblings.orders.read())
        monitor.start()
        loop_watch.start()
        if self.sharing is not None:
            self.sharing.start()
        self.tenancy.start()
        try:
            await monitor.first_polls(_FIRST_POLLS_S)  # meanwhile the kernel keeps connections waiting
            yield self
        finally:
            self.straight = None
            loop_watch.close()
            await warmer.close()
            if self.sharing is not None:
                await self.sharing.close()
            await self.tenancy.close()
            await quarantine.close()
            await monitor.close()
            await upstream.close()
            prefix.close()
            await self.access_log.close()
            if self.trace_file is not None:
                await self.trace_file.close()

    def _on_served(self, warmer: Warmer) -> Served | None:
        """Who wants to know of requests that got their whole answer."""
        trace_file, keeps = self.trace_file, self.settings.warmup_store_bytes > 0

        def both(parsed: ParsedRequest, path: str, lease: Lease, record: RequestRecord) -> None:
            if keeps:
                warmer.served(parsed, path, lease)
            if trace_file is not None:
                trace_file.write(parsed, record, lease.chain)

        return both if keeps or trace_file is not None else None

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
            self.router.stats.num_queued + self.admission.num_queued,
            self.router.stats.num_in_flight,
            len(asyncio.all_tasks()),
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
            replica.gate.is_open,
        )


def create_app(settings: GatewaySettings) -> Gateway:
    """Raises what Gateway does."""
    return Gateway(settings)
