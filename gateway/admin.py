"""What an administrator may tell the gateway: to take no new requests, or to give a replica none.

    POST /admin/drain                     refuse new requests (503) and say so in /ready; what is under way goes on
    DELETE /admin/drain                   take requests again
    POST /admin/replicas/{name}/drain     give that replica no new requests; DELETE gives it some again
    POST ...?over_s=60                    ever fewer until then, while others take over what it holds

Each answers with how much is still under way, so that whoever waits for zero can ask again. They need the shared secret
in x-warmgate-secret; without one configured there is no administration over HTTP.
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine_worker.contract.errors import ApiError
from gateway.orders import OrderBook, Orders
from gateway.replicas.registry import Replica
from policies.types import ReplicaId

if TYPE_CHECKING:
    from gateway.app import Gateway

SECRET_HEADER = "x-warmgate-secret"


def is_operator(gateway: Gateway, request: Request) -> bool:
    """Whether the pages for operators are open to whoever asks: to all while there are no API keys; then to this
    machine, and to others with the secret (in our header, or as a bearer token, which Prometheus can send). Only our
    own processes reach the Unix socket of one, which has no client address (siblings.py)."""
    if gateway.siblings is not None and request.client is None:
        return True
    if gateway.tenancy.is_open or (request.client is not None and _is_loopback(request.client.host)):
        return True
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = request.headers.get(SECRET_HEADER) or (token.strip() if scheme.lower() == "bearer" else "")
    return _is_secret(gateway, given)


def check_operator(gateway: Gateway, request: Request) -> None:
    """Raises ApiError(401)."""
    if not is_operator(gateway, request):
        message = f"This page is for operators: send WARMGATE_SECRET as {SECRET_HEADER} or as a bearer token."
        raise ApiError(401, message, code="wrong_secret")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_secret(gateway: Gateway, given: str) -> bool:
    secret = gateway.settings.secret
    if secret is None or not secret.get_secret_value():
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.get_secret_value().encode())


def _over_s(request: Request) -> float:
    text = request.query_params.get("over_s", "0")
    try:
        over_s = float(text)
    except ValueError:
        over_s = -1.0
    if not 0.0 <= over_s <= 86_400.0:
        raise ApiError(400, "over_s is a time in seconds, from 0 to 86400.", param="over_s")
    return over_s


def drain_now(gateway: Gateway, replica: Replica, drained: bool, over_s: float) -> None:
    assert gateway.warmer is not None, "orders come after lifespan's startup"
    if drained and over_s > 0.0:
        gateway.warmer.drain(replica, over_s)
    else:
        gateway.warmer.stay(replica)
        gateway.registry.drain(replica, drained)


def follow(gateway: Gateway, orders: Orders) -> None:
    """What was ordered before this process took another's place."""
    gateway.drain(orders.draining)
    for replica in gateway.registry:
        until = orders.replicas.get(replica.replica_id)
        if until is not None:
            drain_now(gateway, replica, True, until - time.monotonic())


def admin_routes(gateway: Gateway) -> list[Route]:
    def check_secret(request: Request) -> None:
        secret = gateway.settings.secret
        if secret is None or not secret.get_secret_value():
            message = "Administration needs a shared secret: start the gateway with WARMGATE_SECRET set."
            raise ApiError(403, message, code="no_secret")
        if not _is_secret(gateway, request.headers.get(SECRET_HEADER, "")):
            raise ApiError(401, f"The header {SECRET_HEADER} is missing or wrong.", code="wrong_secret")

    def book(request: Request) -> OrderBook | None:
        """Where the order is kept for processes to come, if it concerns all."""
        siblings = gateway.siblings
        return siblings.orders if siblings is not None and siblings.concerns_all(request) else None

    async def answered(request: Request, state: dict[str, Any]) -> Response:
        """`state` of this process, after those that share its port have taken the order, too."""
        siblings = gateway.siblings
        if siblings is not None and siblings.concerns_all(request):
            state["num_in_flight"] += sum(told["num_in_flight"] for told in await siblings.repeat(request))
        return Response(msgspec.json.encode(state), media_type="application/json")

    async def drain(request: Request) -> Response:
        check_secret(request)
        if (kept := book(request)) is not None:  # first, so that a process just starting knows or is told
            kept.drain(request.method == "POST")
        gateway.drain(request.method == "POST")
        return await answered(request, {"draining": gateway.draining, "num_in_flight": gateway.admission.num_in_flight})

    async def drain_replica(request: Request) -> Response:
        check_secret(request)
        name = request.path_params["name"]
        try:
            replica = gateway.registry.get(ReplicaId(name))
        except KeyError:
            known = ", ".join(replica.replica_id for replica in gateway.registry)
            raise ApiError(404, f"No replica is named {name[:128]!r}; there are {known}.", code="not_found") from None
        over_s = _over_s(request)
        if (kept := book(request)) is not None:
            kept.drain_replica(name, request.method == "POST", over_s)
        drain_now(gateway, replica, request.method == "POST", over_s)
        return await answered(
            request, {"id": replica.replica_id, "state": replica.status.value, "num_in_flight": replica.num_leases}
        )

    return [
        Route("/admin/drain", drain, methods=["POST", "DELETE"]),
        Route("/admin/replicas/{name:path}/drain", drain_replica, methods=["POST", "DELETE"]),
    ]
