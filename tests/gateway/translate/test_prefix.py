"""A translated conversation has the block keys of the chat that means the same, turn after turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.openai.parse import parse_request
from gateway.prefix import PrefixService
from gateway.translate.messages import MessagesTranslation
from gateway.translate.responses import ResponsesTranslation
from gateway.translate.store import ResponseStore
from policies.types import PrefixChain, ReplicaId
from tests.support.tiny_tokenizer import tiny_bundle

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool>{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = "What is the weather in the quick brown city, and will it change before the dog is back?"
ANSWER = "It is sunny there, and it stays so. The fox does not mind at all."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "after": {"type": "integer"}}}
ARGUMENTS = '{"city": "Größe", "after": 2}'
SYSTEM = "You are a helpful assistant. Answer in short sentences and name your sources."

CHAT_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": ASKED},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "And tomorrow?"},
]
MESSAGES_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": ASKED, "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(ARGUMENTS)}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
    {"role": "user", "content": "And tomorrow?"},
]
RESPONSES_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}],
    },
    {"role": "user", "content": "And tomorrow?"},
]


def chat_body(num_turns: int) -> bytes:
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
    system = {"role": "system", "content": SYSTEM}
    return json.dumps({"model": "m", "messages": [system, *CHAT_TURNS[:num_turns]], "tools": tools}).encode()


def messages_body(num_turns: int) -> bytes:
    tools = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
    billing = {"type": "text", "text": f"x-anthropic-billing-header: turn {num_turns}"}
    system = [billing, {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    body = {"model": "m", "max_tokens": 9, "system": system, "messages": MESSAGES_TURNS[:num_turns], "tools": tools}
    return MessagesTranslation().request(json.dumps(body).encode())


def responses_body(num_turns: int) -> bytes:
    tools = [{"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}]
    body = {"model": "m", "instructions": SYSTEM, "input": RESPONSES_TURNS[:num_turns], "tools": tools}
    return ResponsesTranslation(ResponseStore(0)).request(json.dumps(body).encode())


@pytest.mark.parametrize("mode", ["token", "text"])
async def test_the_chains_are_those_of_the_equal_chat(mode: str) -> None:
    service = PrefixService()
    try:
        bundle = tiny_bundle(TEMPLATE) if mode == "token" else None
        space = await service.register(ReplicaId("a"), "m", bundle, 4)

        async def chain(body: bytes) -> PrefixChain:
            source = parse_request("chat", body).source
            assert source is not None
            return (await service.chains(source, [space.key_space]))[space.key_space]

        previous: tuple[int, ...] = ()
        for num_turns in (1, 3, 5):  # those that end with something to answer
            expected = await chain(chat_body(num_turns))
            assert len(expected.keys) >= 2
            assert await chain(messages_body(num_turns)) == expected
            assert await chain(responses_body(num_turns)) == expected
            # The last blocks hold the generation prompt, which the next turn replaces.
            num_kept = max(0, len(previous) - 4)
            assert expected.keys[:num_kept] == previous[:num_kept]
            previous = expected.keys
    finally:
        service.close()
