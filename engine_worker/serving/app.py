"""The worker's routes as one plain ASGI application, and the one place where exceptions become responses."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from engine_worker.contract.errors import ApiError
from engine_worker.contract.resume import RESUME_PATH
from engine_worker.serving import metrics
from engine_worker.serving.http import ClientGone, Exchange, Receive, Scope, Send
from engine_worker.serving.json_input import parse_object
from engine_worker.serving.requests import DetokenizeRequest, TokenizeRequest, convert
from engine_worker.serving.validation import invalid
from engine_worker.serving.worker import LoadedModel, Worker

logger = logging.getLogger("warmgate.worker")

Handler = Callable[[Exchange], Awaitable[None]]

_MODELS = "/v1/models/"
_SLASHES = re.compile("/{2,}")


class App:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._started = int(time.time())
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            RESUME_PATH: {"POST": self._resume},
            "/internal/state": {"GET": self._state},
            "/internal/tokenizer": {"GET": self._tokenizer},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            try:
                await self._dispatch(exchange)
            except ApiError as error:
                if exchange.started:
                    raise
                await exchange.fail(error)
        except ClientGone:
            pass
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path[:200])
            if not exchange.started:
                await exchange.fail(ApiError(500, "The worker failed on this request; its log says why."))

    async def _dispatch(self, exchange: Exchange) -> None:
        path = _SLASHES.sub("/", exchange.path)
        path = path.rstrip("/") or path
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODELS) and len(path) > len(_MODELS):
            methods = {"GET": self._model}
        if methods is None:
            raise ApiError(404, f"There is no {path[:200]!r} here.", code="not_found")
        allowed = sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])})
        allow = (b"allow", ", ".join(allowed).encode())
        if exchange.method == "OPTIONS":
            await exchange.start(204, [allow])
            await exchange.end()
            return
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            error = ApiError(405, f"{path} takes {', '.join(methods)}, not {exchange.method[:20]}.")
            await exchange.fail(error, [allow])
            return
        await handler(exchange)

    async def _chat(self, exchange: Exchange) -> None:
        await self._worker.loaded().generator.chat(exchange)

    async def _completion(self, exchange: Exchange) -> None:
        await self._worker.loaded().generator.completion(exchange)

    async def _resume(self, exchange: Exchange) -> None:
        self._check_secret(exchange)
        await self._worker.loaded().generator.resume(exchange)

    async def _models(self, exchange: Exchange) -> None:
        loaded = self._worker.loaded()
        cards = [self._card(name, loaded) for name in self._worker.served_models]
        await _json(exchange, {"object": "list", "data": cards})

    async def _model(self, exchange: Exchange) -> None:
        loaded = self._worker.loaded()
        name = _SLASHES.sub("/", exchange.path)[len(_MODELS) :].rstrip("/")
        loaded.preparer.check_model(name)
        await _json(exchange, self._card(name, loaded))

    def _card(self, name: str, loaded: LoadedModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "warmgate",
            "root": self._worker.served_models[0],
            "parent": None,
            "max_model_len": loaded.ready.info.max_model_len,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        loaded = self._worker.loaded()
        await self._off_loop(exchange, tokenize, loaded)

    async def _detokenize(self, exchange: Exchange) -> None:
        loaded = self._worker.loaded()
        await self._off_loop(exchange, detokenize, loaded)

    async def _off_loop(
        self, exchange: Exchange, function: Callable[[LoadedModel, bytes], dict[str, Any]], loaded: LoadedModel
    ) -> None:
        body = await exchange.body()
        loop = asyncio.get_running_loop()
        await _json(exchange, await loop.run_in_executor(self._worker.executor, function, loaded, body))

    async def _health(self, exchange: Exchange) -> None:
        self._worker.loaded()
        if await self._worker.supervisor.is_silent():
            sentence = "The engine process gives no sign of life: it is stopped, or gets no time to run."
            raise ApiError(503, sentence, code="engine_silent", retry_after_s=5)
        await _json(exchange, {"status": "ok"})

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.respond(200, self._worker.metrics.render(), content_type=metrics.CONTENT_TYPE)

    async def _state(self, exchange: Exchange) -> None:
        self._check_secret(exchange)
        await _json(exchange, self._worker.state())

    async def _tokenizer(self, exchange: Exchange) -> None:
        self._check_secret(exchange)
        await _json(exchange, self._worker.loaded().ready.tokenizer)

    def _check_secret(self, exchange: Exchange) -> None:
        secret = self._worker.secret
        given = exchange.header(b"x-warmgate-secret") or b""
        if secret and not hmac.compare_digest(given, secret.encode()):
            raise ApiError(403, "This endpoint needs the header x-warmgate-secret with the worker's WARMGATE_SECRET.")


def tokenize(loaded: LoadedModel, body: bytes) -> dict[str, Any]:
    """vLLM's /tokenize. Raises ApiError."""
    request = convert(parse_object(body), TokenizeRequest)
    preparer = loaded.preparer
    preparer.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "Send either `prompt` or `messages`.")
    if request.prompt is not None:
        ids = preparer.renderer.encode(request.prompt, request.add_special_tokens is not False)
    else:
        text = preparer.renderer.render_chat(
            request.messages or [],
            tools=request.tools or None,
            add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=request.chat_template_kwargs,
        )
        ids = preparer.renderer.encode(text, bool(request.add_special_tokens))
    tokenizer = preparer.renderer.tokenizer
    strings = [tokenizer.id_to_token(token_id) for token_id in ids] if request.return_token_strs else None
    limit = loaded.ready.info.max_model_len
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}


def detokenize(loaded: LoadedModel, body: bytes) -> dict[str, Any]:
    """vLLM's /detokenize. Raises ApiError."""
    request = convert(parse_object(body), DetokenizeRequest)
    loaded.preparer.check_model(request.model)
    loaded.preparer.check_ids(request.tokens, "tokens")
    return {"prompt": loaded.preparer.renderer.decode(request.tokens, skip_special_tokens=False)}


async def _json(exchange: Exchange, value: Any) -> None:
    await exchange.respond(200, msgspec.json.encode(value))


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Anything but HTTP: close a websocket; there is no lifespan to speak of."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})
