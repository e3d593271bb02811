"""One streamed chat completion over HTTP, measured from outside: the moments a user would notice."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
from httpx_sse import aconnect_sse

from loadtest.records import Record

Message = dict[str, str]


async def chat(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[Message],
    max_tokens: int,
    conversation: int = 0,
    turn: int = 0,
) -> Record:
    """Greedy and streamed. A failure of any kind is a record with `error`, never an exception."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen: dict[str, Any] = {"status": 0}
    started_at = time.monotonic()
    try:
        async with aconnect_sse(client, "POST", "/v1/chat/completions", json=body) as events:
            await _read(events, seen)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    return Record(
        conversation=conversation,
        turn=turn,
        started_at=started_at,
        first_token_at=seen.pop("first_token_at", None),
        finished_at=time.monotonic(),
        **seen,
    )


async def _read(events: Any, seen: dict[str, Any]) -> None:
    response: httpx.Response = events.response
    seen["status"] = response.status_code
    if response.status_code != 200:
        seen["error"] = (await response.aread()).decode("utf-8", "replace")[:500]
        return
    seen["replica"] = response.headers.get("x-warmgate-replica", "")
    seen["matched_tokens"] = int(response.headers.get("x-warmgate-matched-tokens", 0))
    text, done = "", False
    async for event in events.aiter_sse():
        if event.data == "[DONE]":
            done = True
            continue
        chunk = json.loads(event.data)
        if "error" in chunk:
            seen["error"] = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
        if text and "first_token_at" not in seen:
            seen["first_token_at"] = time.monotonic()
        if usage := chunk.get("usage"):
            seen["prompt_tokens"] = usage["prompt_tokens"]
            seen["output_tokens"] = usage["completion_tokens"]
            seen["cached_tokens"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    seen["text"] = text
    if not done:
        seen["error"] = "the stream ended without [DONE]"
