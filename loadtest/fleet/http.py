"""What a fake replica answers to whom: completions to clients, state or metrics to gateways, figures to the report."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec
from aiohttp import web

from engine_worker.contract.errors import ApiError
from engine_worker.contract.prompt import PromptError, PromptRenderer
from engine_worker.contract.state import WorkerState
from engine_worker.contract.work import WORK_HEADER, read_work
from engine_worker.core.scheduler import RequestTooLarge
from loadtest.fleet.replica import FakeReplica, Play, refused
from loadtest.fleet.text import MAX_MODEL_LEN, tokenizer_bundle

MAX_BODY_BYTES = 64 * 1024 * 1024
_FILLER = "bab "
_UNREADABLE = (PromptError, msgspec.DecodeError, KeyError, TypeError)


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[dict[str, Any]] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """A completion of either kind; what is not named here is accepted and means nothing."""

    messages: list[_Message] | None = None
    prompt: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None

    def text(self) -> str:
        if self.messages is None:
            return self.prompt if isinstance(self.prompt, str) else "".join(self.prompt or [])
        said = [message.content for message in self.messages]
        return "".join(part if isinstance(part, str) else _parts(part) for part in said)


def _parts(content: list[dict[str, Any]] | None) -> str:
    return "".join(str(part.get("text", "")) for part in content or [])


def make_app(replica: FakeReplica) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    server = _Server(replica)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/fake/stats", server.stats)
    if replica.config.manner == "warmgate":
        app.router.add_get("/internal/state", server.state)
        app.router.add_get("/internal/tokenizer", server.tokenizer)
    else:
        app.router.add_post("/v1/chat/completions/render", server.render)
    app.router.add_route("*", "/{path:.*}", server.unknown)
    return app


class _Server:
    def __init__(self, replica: FakeReplica) -> None:
        self.replica = replica
        self._renders = itertools.count(1)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read(), type=_Body)
        except msgspec.DecodeError as error:
            return refused(f"the body can't be read: {error}")
        most = body.max_completion_tokens or body.max_tokens or 16
        try:
            play = self.replica.submit(body.text(), most, self._work_s(request))
        except RequestTooLarge as error:
            return refused(str(error))
        except ApiError as error:
            return web.Response(status=error.status, body=error.body(), content_type="application/json")
        try:
            is_chat = request.path.endswith("chat/completions")
            if body.stream:
                wants_usage = body.stream_options is not None and body.stream_options.include_usage
                return await self._stream(request, play, is_chat, wants_usage)
            return await self._whole(play, is_chat)
        finally:
            self.replica.cancel(play)

    def _work_s(self, request: web.Request) -> float:
        """Raises ApiError. vLLM doesn't know the header."""
        value = request.headers.get(WORK_HEADER.decode())
        if value is None or self.replica.config.manner == "vllm":
            return 0.0
        self.replica.counts.num_with_work += 1
        return read_work(value.encode("utf-8", "surrogateescape"))

    async def _whole(self, play: Play, is_chat: bool) -> web.Response:
        await play.last
        text = _FILLER * self.replica.usage(play)["completion_tokens"]
        frame = self._frame(play, is_chat, text, "length", whole=True)
        frame["usage"] = self.replica.usage(play)
        return web.Response(
            body=msgspec.json.encode(frame), content_type="application/json", headers=self._headers(play)
        )

    async def _stream(self, request: web.Request, play: Play, is_chat: bool, wants_usage: bool) -> web.StreamResponse:
        early = self.replica.config.manner == "vllm"
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if early:
            await response.prepare(request)
        await play.first
        if not early:
            response.headers.update(self._headers(play))
            await response.prepare(request)
        await response.write(_event(self._frame(play, is_chat, _FILLER, None, first=True)))
        await play.last
        num_more = self.replica.usage(play)["completion_tokens"] - 1
        ending = [self._frame(play, is_chat, _FILLER * num_more, None)] if num_more else []
        ending.append(self._frame(play, is_chat, "", "length"))
        if wants_usage:
            ending.append({**self._frame(play, is_chat, "", None), "choices": [], "usage": self.replica.usage(play)})
        await response.write(b"".join(map(_event, ending)) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _headers(self, play: Play) -> dict[str, str]:
        if self.replica.config.manner == "vllm":
            return {}
        cached = (play.request.num_cached_tokens or 0) // self.replica.wording.compress
        return {"x-warmgate-cached-tokens": str(cached), "x-request-id": play.request.request_id}

    def _frame(
        self, play: Play, is_chat: bool, text: str, finish: str | None, first: bool = False, whole: bool = False
    ) -> dict[str, Any]:
        kind = "chat.completion" if is_chat else "text_completion"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if not is_chat:
            choice["text"] = text
        elif whole:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": text} if text else role
            kind += ".chunk"
        head = {"id": play.request.request_id, "object": kind, "created": int(self.replica.started_at)}
        return {**head, "model": self.replica.config.model, "choices": [choice]}

    async def models(self, request: web.Request) -> web.Response:
        self.replica.counts.num_polls += 1
        owner = "vllm" if self.replica.config.manner == "vllm" else "warmgate"
        entry = {"id": self.replica.config.model, "object": "model", "created": 1, "owned_by": owner}
        return web.json_response({"object": "list", "data": [{**entry, "max_model_len": MAX_MODEL_LEN}]})

    async def health(self, request: web.Request) -> web.Response:
        self.replica.counts.num_polls += 1
        return web.json_response({})

    async def state(self, request: web.Request) -> web.Response:
        self.replica.counts.num_polls += 1
        replica, config, feed = self.replica, self.replica.config, self.replica.feed
        stats = replica.engine.scheduler.stats()
        state = WorkerState(
            status="ready",
            incarnation=replica.incarnation,
            version="fake",
            model=config.model,
            tokenizer_fingerprint=tokenizer_bundle().fingerprint,
            model_fingerprint=tokenizer_bundle().fingerprint,  # without one a gateway takes it for another's engine
            max_model_len=MAX_MODEL_LEN,
            block_size=replica.wording.block_words,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            step_tokens=replica.step_words,
            max_num_seqs=config.max_num_seqs,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens // replica.wording.compress,
            num_preemptions=stats.num_preemptions,
            kv_events_endpoint=feed.endpoint,
            kv_events_replay_endpoint=feed.replay_endpoint,
        )
        return web.Response(body=msgspec.json.encode(state), content_type="application/json")

    async def tokenizer(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(tokenizer_bundle()), content_type="application/json")

    async def tokenize(self, request: web.Request) -> web.Response:
        try:
            count, ids = await self._ids(request)
        except _UNREADABLE as error:
            return refused(f"it can't be tokenized: {error}")
        return _json({"tokens": ids, "count": count, "max_model_len": MAX_MODEL_LEN})

    async def render(self, request: web.Request) -> web.Response:
        """vLLM's: a chat as the tokens that it would compute. Where there is none vllm-router asks for /tokenize."""
        try:
            _, ids = await self._ids(request)
        except _UNREADABLE as error:
            return refused(f"it can't be rendered: {error}")
        number = next(self._renders)
        return _json({"request_id": f"render-{number}", "token_ids": ids, "sampling_params": {}})

    async def _ids(self, request: web.Request) -> tuple[int, msgspec.Raw]:
        """How many, and them as JSON. Raises one of _UNREADABLE."""
        body = msgspec.json.decode(await request.read())
        if "messages" in body:
            generates = body.get("add_generation_prompt", True)
            text = _renderer().render_chat(body["messages"], body.get("tools"), generates)
        else:
            text = body["prompt"]
        return encoded(text)

    async def metrics(self, request: web.Request) -> web.Response:
        self.replica.counts.num_polls += 1
        replica, stats = self.replica, self.replica.engine.scheduler.stats()
        label = f'{{model_name="{replica.config.model}",engine="0"}}'
        usage = 1.0 - stats.num_free_blocks / stats.num_blocks
        cache = f'block_size="{replica.wording.block_words}",num_gpu_blocks="{stats.num_blocks}"'
        size = replica.wording.compress
        lines = [
            f"vllm:num_requests_running{label} {stats.num_running}",
            f"vllm:num_requests_waiting{label} {stats.num_waiting}",
            f"vllm:kv_cache_usage_perc{label} {usage}",
            f"vllm:cache_config_info{{{cache}}} 1.0",
            f"vllm:prefix_cache_queries_total{label} {stats.prefix_cache_queries // size}",
            f"vllm:prefix_cache_hits_total{label} {stats.prefix_cache_hits // size}",
            f"process_start_time_seconds {replica.started_at}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response(self.replica.stats())

    async def unknown(self, request: web.Request) -> web.Response:
        paths = self.replica.counts.unknown_paths
        paths[request.path] = paths.get(request.path, 0) + 1
        return web.json_response({"detail": "Not Found"}, status=404)


@functools.cache
def _renderer() -> PromptRenderer:
    return PromptRenderer(tokenizer_bundle())


@functools.lru_cache(maxsize=256)
def encoded(text: str) -> tuple[int, msgspec.Raw]:
    """How many tokens, and them as JSON. Done once for all replicas: vllm-router asks every one of them for each
    request, and where each has a machine of its own they take no longer than one."""
    ids = _renderer().encode(text, add_special_tokens=False)
    return len(ids), msgspec.Raw(msgspec.json.encode(ids))


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
