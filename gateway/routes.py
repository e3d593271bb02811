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
from gateway.answer import request_id
from gateway.observe.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from gateway.app import Gateway


def cold_routes(gateway: Gateway) -> Starlette:
    """A starlette application over `gateway`'s state."""
    started = int(time.time())

    def model_entry(model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": started, "owned_by": "warmgate"}

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [model_entry(model) for model in gateway.registry.models()]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in gateway.registry.models():
            message = f"The model {name[:128]!r} does not exist here."
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(model_entry(name))

    async def health(request: Request) -> Response:
        """200 while the gateway serves at all; what it has behind it is in the body."""
        replicas = [
            {
                "id": replica.replica_id,
                "state": replica.status.value,
                "models": sorted(replica.models),
                "engine": replica.dialect,
                "keys": replica.key_mode,
                "kv_feed": replica.kv_feed,
                "detail": replica.detail,
            }
            for replica in gateway.registry
        ]
        num_ready = len(gateway.registry.ready())
        status = "draining" if gateway.draining else "ok" if num_ready else "no_replica"
        policy = gateway.router.policy.name
        return _json({"status": status, "policy": policy, "num_ready": num_ready, "replicas": replicas})

    async def ready(request: Request) -> Response:
        """200 when a request could be served now, else 503: for load balancers."""
        is_ready = not gateway.draining and bool(gateway.registry.ready())
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/models/{model:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
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
