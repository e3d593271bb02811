"""Anthropic's count_tokens: how many tokens a Messages request's prompt has, without asking a model.

Where the gateway has the tokenizer of a replica of that model, it counts by itself. Otherwise a replica's own
/tokenize is asked, through the proxy like any request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from engine_worker.contract.errors import ApiError
from gateway.answer import ClientGone, Headers, Message, Receive, Scope, Send, read_body, request_id
from gateway.observe.record import RequestRecord
from gateway.openai.fields import ParsedRequest
from gateway.openai.parse import parse_request
from gateway.prefix.service import PrefixService
from gateway.prefix.source import PromptSource
from gateway.replicas.registry import Registry
from gateway.tenancy.directory import Identity
from gateway.tenancy.service import Tenancy
from gateway.translate.answer import TranslatedAnswer, Translation
from gateway.translate.chat import ChatAnswer, Json, encode
from gateway.translate.messages import MessagesTranslation
from gateway.translate.messages_in import chat_request, read_messages

Serve = Callable[[Scope, Receive, Send, Translation], Awaitable[None]]
_FOR_TOKENIZE = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


class CountTranslation(MessagesTranslation):
    """A count by a replica: the chat's prompt as a request to /tokenize."""

    name = "count_tokens"

    def request(self, body: bytes) -> bytes:
        return encode(_tokenize_request(body))

    def raw(self, body: bytes) -> bytes | None:
        return encode({"input_tokens": msgspec.json.decode(body, type=_Counted).count})

    def whole(self, answer: ChatAnswer) -> bytes:
        raise AssertionError("a count is read raw")


class _Counted(msgspec.Struct, frozen=True):
    count: int


class TokenCounter:
    """`serve` takes a request through the proxy; `resolve` knows aliases and raises ApiError for unknown models."""

    def __init__(
        self, prefix: PrefixService, registry: Registry, resolve: Callable[[str], str], serve: Serve, max_bytes: int,
        body_s: float, tenancy: Tenancy,
    ) -> None:  # fmt: skip
        self._tenancy = tenancy
        self._prefix = prefix
        self._registry = registry
        self._resolve = resolve
        self._serve = serve
        self._max_bytes = max_bytes
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        translation = CountTranslation()
        record = RequestRecord(request_id=request_id(scope), endpoint=translation.name, started_at=0.0)
        answer = TranslatedAnswer(scope, send, translation, record)
        answer.headers = [(b"x-request-id", record.request_id.encode("ascii"))]
        try:
            identity = self._tenancy.identify(scope)
            body = await self._body(scope, receive)
            num_tokens = await self._count(body, identity, record, answer.headers)
        except ApiError as error:
            await answer.error(error)
            return
        except ClientGone:
            return
        if num_tokens is not None:
            await answer.whole(200, [], encode({"count": num_tokens}))
            return
        await self._serve(scope, _replay(body, receive), send, translation)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self._body_s):
                return await read_body(scope, receive, self._max_bytes)
        except TimeoutError:
            raise ApiError(408, "The request's body did not arrive in time.") from None

    async def _count(
        self, body: bytes, identity: Identity | None, record: RequestRecord, headers: Headers
    ) -> int | None:
        """None where no replica's tokenizer is at hand."""
        chat = _tokenize_request(body)
        model = self._resolve(chat["model"])
        if identity is not None:
            identity.check_model(chat["model"], model)
        replica = next((replica for replica in self._registry.ready(model) if replica.key_mode == "token"), None)
        if replica is None:
            return None
        source = parse_request("chat", encode(chat)).source
        assert isinstance(source, PromptSource)
        visit = None
        if identity is not None:  # counted among its requests, like those that a replica counts for
            parsed = ParsedRequest(endpoint="tokenize", body=body, model=model)
            visit = await self._tenancy.admit(identity, parsed, record, headers)
        try:
            return len(await self._prefix.packed_ids(replica.replica_id, source)) // 4
        finally:
            if visit is not None:
                visit.end(record, 0)


def _tokenize_request(body: bytes) -> Json:
    """The chat's fields that decide its prompt. Raises ApiError."""
    chat = chat_request(*read_messages(body, needs_max_tokens=False))
    return {name: chat[name] for name in _FOR_TOKENIZE if name in chat}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` whose first message is the body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
