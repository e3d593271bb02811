"""Routes off the hot path: models, health, metrics; and 404 and 405 in OpenAI's error shape."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine_worker.contract.errors import ApiError
from gateway.admin import admin_routes, check_operator, is_operator
from gateway.answer import request_id
from gateway.observe.advice import report
from gateway.observe.metrics import CONTENT_TYPE
from gateway.observe.watched import together, watched_by
from gateway.openapi import document
from gateway.siblings import pid_header

if TYPE_CHECKING:
    from gateway.app import Gateway


def cold_routes(gateway: Gateway) -> Starlette:
    """A starlette application over `gateway`'s state."""
    started = int(time.time())
    described = msgspec.json.encode(document())

    def model_entry(name: str, model: str) -> dict[str, object]:
        root = {"root": model} if model != name else {}
        return {"id": name, "object": "model", "created": started, "owned_by": "warmgate", **root}

    def anthropic_entry(name: str) -> dict[str, object]:
        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
        return {"type": "model", "id": name, "display_name": name, "created_at": created_at}

    async def models(request: Request) -> Response:
        listed = gateway.listed_models(gateway.tenancy.identify(request.scope))
        if "anthropic-version" in request.headers:
            data = [anthropic_entry(name) for name, _ in listed]
            ends = {"first_id": listed[0][0], "last_id": listed[-1][0]} if listed else {}
            return _json({"data": data, "has_more": False, "first_id": None, "last_id": None, **ends})
        return _json({"object": "list", "data": [model_entry(*entry) for entry in listed]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        known = dict(gateway.listed_models(gateway.tenancy.identify(request.scope)))
        if name not in known:
            message = f"The model {name[:128]!r} does not exist here."
            raise ApiError(404, message, param="model", code="model_not_found")
        if "anthropic-version" in request.headers:
            return _json(anthropic_entry(name))
        return _json(model_entry(name, known[name]))

    async def response(request: Request) -> Response:
        """An answer of the Responses API that was kept: GET shows it, DELETE forgets it."""
        response_id = request.path_params["response_id"]
        identity = gateway.tenancy.identify(request.scope)
        responses = gateway.responses.of(identity.tenant if identity is not None else "")
        if request.method == "DELETE" and responses.delete(response_id):
            return _json({"id": response_id, "object": "response", "deleted": True})
        body = None if request.method == "DELETE" else responses.get(response_id)
        if body is None:
            raise ApiError(404, f"The response {response_id[:64]!r} is not known here (any more).", param="response_id")
        return Response(body, media_type="application/json")

    async def health(request: Request) -> Response:
        """200 while the gateway serves at all; what it has behind it is in the body, for its operators."""
        replicas = [
            {
                "id": replica.replica_id,
                "state": replica.status.value,
                "models": sorted(replica.models),
                "engine": replica.dialect,
                "keys": replica.key_mode,
                "kv_feed": replica.kv_feed,
                "keeps_tenants_apart": replica.keeps_apart,
                "detail": replica.remarks,
            }
            for replica in gateway.registry
        ]
        num_ready = len(gateway.registry.ready())
        status = "draining" if gateway.draining else "ok" if num_ready else "no_replica"
        if not is_operator(gateway, request):
            return _json({"status": status, "num_ready": num_ready})
        policy = gateway.router.policy.name
        sharing = gateway.sharing.figures().for_health() if gateway.sharing is not None else {"state": "off"}
        body = {"status": status, "policy": policy, "num_ready": num_ready, "replicas": replicas, "sharing": sharing}
        return _json(body)

    async def ready(request: Request) -> Response:
        """200 when a request could be served now, else 503: for load balancers."""
        is_ready = not gateway.draining and bool(gateway.registry.ready())
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        check_operator(gateway, request)
        siblings, own = gateway.siblings, gateway.metrics.render()
        if siblings is not None and siblings.concerns_all(request):
            own = await siblings.metrics(own)
        return Response(own, headers=pid_header(), media_type=CONTENT_TYPE)

    async def advice(request: Request) -> Response:
        """Whether a shadow policy would pay, in sentences (`warmgate advise` prints them)."""
        check_operator(gateway, request)
        siblings, shadows, live = gateway.siblings, gateway.router.shadows, gateway.settings.policy
        if siblings is None or shadows is None:
            return _json(report(shadows, live))
        own = watched_by(shadows)
        if not siblings.concerns_all(request):
            return _json({**report(own, live), "sums": own})
        parts = [own, *await siblings.watched()]
        told = report(together(parts), live)
        if (num_silent := siblings.count - len(parts)) > 0:
            told["sentences"].append(
                f"{num_silent} of {siblings.count} processes did not answer: this is without them."
            )
        return _json({**told, "num_processes": len(parts)})

    async def about(request: Request) -> Response:
        """For whoever opens the address itself: what answers here, and where what it can do is."""
        return _json(
            {
                "service": "warmgate",
                "about": "A gateway to language models. Point OpenAI clients at /v1 of this address.",
                "api": "/v1",
                "models": "/v1/models",
                "openapi": "/openapi.json",
                "health": "/health",
                "ready": "/ready",
                "metrics": "/metrics",
            }
        )

    async def openapi(request: Request) -> Response:
        return Response(described, media_type="application/json")

    routes = [
        Route("/", about),
        Route("/v1", about),
        Route("/openapi.json", openapi),
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/models/{model:path}", model),
        Route("/v1/responses/{response_id}", response, methods=["GET", "DELETE"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/advice", advice),
        *admin_routes(gateway),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _api_error, HTTPException: _http_error})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error_response(request: Request, error: ApiError) -> Response:
    headers = {"x-request-id": request_id(request.scope)}
    return Response(error.body(), error.status, headers, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        message, code = f"There is no {path} here.", "not_found"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed on {path}.", "method_not_allowed"
    else:
        message, code = str(error.detail), None
    response = _error_response(request, ApiError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response
