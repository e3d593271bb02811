"""How a replica's prompts are cut into blocks, and how its cache contents are followed.

Token mode needs the replica's tokenizer (served by it, or from a configured folder), its block size, and a parity
self-test that finds our ids equal to its own. Anything less is text mode, with the reason in the log. A replica in
token mode that publishes KV events is followed by a feed; the others are known from what was sent to them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine_worker.contract.state import TokenizerBundle
from gateway.observe.metrics import Metrics
from gateway.prefix.parity import check_parity
from gateway.prefix.service import PrefixService, Space
from gateway.prefix.translate import KvEventTranslator
from gateway.replicas.dialect import ControlClient, Dialect, PollError, Report
from gateway.replicas.kv_feed import FeedStatus, KvFeed, reachable_endpoint
from gateway.replicas.registry import Cut, Replica
from policies.events import Event

_log = logging.getLogger("warmgate.replicas")
_DEFAULT_BLOCK_TOKENS = 16
_TOKENIZE_S = 30.0
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class _RefusalError(msgspec.Struct, frozen=True):
    code: str | int | None = None
    param: str | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error: _RefusalError


class _NoTokenize(Exception):
    """The replica can't be asked how it tokenizes; the message says why, as the rest of a sentence about it."""


class TokenizerFolderError(Exception):
    """A configured tokenizer folder can't be used; the message says why."""


class CutMaker:
    """Makes a replica's cut when it becomes ready, and keeps its feed. `emit` applies events to the fleet."""

    def __init__(
        self, prefix: PrefixService, metrics: Metrics, emit: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        self._prefix = prefix
        self._metrics = metrics
        self._emit = emit
        self._clock = clock
        self._feeds: dict[str, KvFeed] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def text(self, replica: Replica, report: Report, trouble: str = "") -> Cut:
        space = await self._prefix.register(replica.replica_id, _model(report), None)
        return Cut(space.key_space, space.block_tokens, "text", trouble)

    async def make(self, replica: Replica, dialect: Dialect, client: ControlClient, report: Report) -> Cut:
        """The best cut that this replica allows. Raises PollError when it stops answering meanwhile."""
        block_tokens = report.block_tokens or _DEFAULT_BLOCK_TOKENS
        try:
            bundle = await self._bundle(replica, dialect)
            if bundle is None:
                return await self.text(replica, report)
            space = await self._prefix.register(replica.replica_id, _model(report), bundle, block_tokens)
        except (TokenizerFolderError, ValueError) as error:
            return await self._only_text(replica, report, str(error))
        mismatch = await self._parity(replica, client, _asked(report))
        if mismatch is not None:
            self._metrics.parity_mismatch(replica.replica_id)
            return await self._only_text(replica, report, mismatch)
        return Cut(space.key_space, space.block_tokens, "token")

    async def _only_text(self, replica: Replica, report: Report, why: str) -> Cut:
        _log.warning("replica %s is served in text mode: %s", replica.replica_id, why)
        return await self.text(replica, report, f"it is served in text mode: {why}")

    async def _parity(self, replica: Replica, client: ControlClient, model: str) -> str | None:
        """The sentence that says how its tokens differ from ours; None where they don't, or where it can't be asked."""

        async def tokenize(body: dict[str, Any]) -> Sequence[int] | None:
            response = await client.post("/tokenize", body, timeout_s=_TOKENIZE_S)
            if response.status_code == 404 and _names_the_model(response.content):
                raise _NoTokenize(f"doesn't know its own model {model!r} in /tokenize")
            if response.status_code in (404, 405, 501):
                raise _NoTokenize("has no /tokenize like vLLM's")
            if 400 <= response.status_code < 500:
                return None
            if response.status_code >= 300:
                raise PollError(f"/tokenize answered {response.status_code} and no tokens")
            try:
                return msgspec.json.decode(response.content, type=_Tokens).tokens
            except msgspec.DecodeError as error:
                # Another endpoint of that name: it will answer so at every poll, and a replica must not wait for it.
                raise _NoTokenize("has no /tokenize like vLLM's") from error

        try:
            parity = await check_parity(self._prefix, replica.replica_id, model, tokenize)
        except _NoTokenize as why:
            _log.warning("replica %s %s: its tokenizer is taken on trust", replica.replica_id, why)
            return None
        if parity.mismatch is None and parity.tools_mismatch is not None:
            _log.warning("replica %s: %s; such prompts are routed less well", replica.replica_id, parity.tools_mismatch)
        return parity.mismatch

    async def _bundle(self, replica: Replica, dialect: Dialect) -> TokenizerBundle | None:
        """Raises TokenizerFolderError and PollError."""
        if replica.spec.tokenizer is None:
            return await dialect.tokenizer()
        return await asyncio.to_thread(read_bundle, replica.spec.tokenizer)

    def restarted(self, replica: Replica) -> None:
        """The process that a feed followed is gone."""
        self._drop_feed(replica)

    def follow(self, replica: Replica, report: Report) -> None:
        """Follow the KV events of a replica that has just joined, where it publishes any."""
        self._drop_feed(replica)
        space = self._prefix.space_of(replica.replica_id)
        if not report.kv_events_endpoint or space is None or not space.tokenizer:
            return
        endpoint = reachable_endpoint(report.kv_events_endpoint, replica.spec.url)
        replay = report.kv_events_replay_endpoint
        if endpoint is None:
            _log.warning(
                "replica %s publishes KV events on %s, which can't be reached from here",
                replica.replica_id,
                report.kv_events_endpoint,
            )
            return
        feed = self._feed(
            replica, space, endpoint, (reachable_endpoint(replay, replica.spec.url) or "") if replay else ""
        )
        self._feeds[replica.replica_id] = feed
        feed.start()

    def _feed(self, replica: Replica, space: Space, endpoint: str, replay_endpoint: str) -> KvFeed:
        def on_events(events: Sequence[Event]) -> None:
            for event in events:
                self._emit(event)

        def on_status(status: FeedStatus, reason: str) -> None:
            replica.kv_feed = status.value
            level = logging.WARNING if status is FeedStatus.APPROXIMATE else logging.INFO
            _log.log(level, "KV events of replica %s: %s (%s)", replica.replica_id, status.value, reason)

        replica.kv_feed = FeedStatus.CONNECTING.value
        translator = KvEventTranslator(replica.replica_id, space)
        return KvFeed(
            replica.replica_id, endpoint, replay_endpoint, translator, on_events, on_status, clock=self._clock
        )

    def _drop_feed(self, replica: Replica) -> None:
        replica.kv_feed = "none"
        feed = self._feeds.pop(replica.replica_id, None)
        if feed is not None:
            task = asyncio.create_task(feed.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        feeds, self._feeds = self._feeds, {}
        await asyncio.gather(*(feed.close() for feed in feeds.values()), *self._closing, return_exceptions=True)


def _model(report: Report) -> str:
    """The model that it is, whatever the replica serves it as."""
    return report.base_model or min(report.models)


def _asked(report: Report) -> str:
    """The name to ask it by: the base model is loaded under one name and may be served under others only."""
    return report.base_model if report.base_model in report.models else min(report.models)


def _names_the_model(body: bytes) -> bool:
    """Whether a 404 speaks of the model in its body, and not of the path: an error of OpenAI's shape."""
    try:
        error = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.DecodeError:
        return False
    return error.code == "model_not_found" or error.param == "model"


def read_bundle(folder: Path) -> TokenizerBundle:
    """A tokenizer folder as Hugging Face writes it. Raises TokenizerFolderError."""
    config = _read_json(folder / "tokenizer_config.json")
    try:
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerFolderError(f"{folder} has no readable tokenizer.json") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None and (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    digest = hashlib.sha256(tokenizer_json.encode() + (template or "").encode()).hexdigest()
    max_len = config.get("model_max_length")
    return TokenizerBundle(
        fingerprint=digest,
        tokenizer_json=tokenizer_json,
        chat_template=template,
        special_tokens=special,
        max_model_len=max_len if isinstance(max_len, int) and max_len < 2**31 else 0,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerFolderError(f"{path} can't be read") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
