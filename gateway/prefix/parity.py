"""Is our idea of a replica's prompts the replica's own? Asked once, when it registers.

A few prompts that templates and tokenizers are known to disagree on are cut here and tokenized there. Where the ids
differ, token keys would name blocks that the replica never computes, and its text serves better. A replica may also
refuse a prompt that its template has no place for; then we must refuse it, too.

Tools are compared apart: engines rewrite tool definitions before their template sees them (key order, nulls), and a
replica that does so is still known well by all prompts without tools.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_worker.contract.prompt import PromptError
from gateway.prefix.keys import pack_ids
from gateway.prefix.service import PrefixService
from gateway.prefix.source import PromptSource
from policies.types import ReplicaId

# Body of POST /tokenize (as vLLM takes it) -> the ids, or None where the replica answers that it can't (4xx).
Tokenize = Callable[[dict[str, Any]], Awaitable[Sequence[int] | None]]

_HARD_TEXT = "  Zeilen\n\n\tTabs, 1234567890 3.14e-2 naïve Ω 日本語 🙂👩‍👩‍👧 snake_case CamelCase  \n"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@dataclass(frozen=True, slots=True)
class Parity:
    """`mismatch` is a sentence naming the probe that differed: serve the replica in text mode. `tools_mismatch` alone
    means that token mode is right except for prompts with tools."""

    mismatch: str | None = None
    tools_mismatch: str | None = None


def _chats() -> dict[str, PromptSource]:
    system = {"role": "system", "content": "You answer briefly."}
    first = {"role": "user", "content": _HARD_TEXT}
    answer = {"role": "assistant", "content": "One.\nTwo. "}
    second = {"role": "user", "content": "And then?"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Part one. "}]}
    return {
        "a single user message": PromptSource(messages=[first]),
        "a conversation with a system message": PromptSource(messages=[system, first, answer, second]),
        "content given as parts": PromptSource(messages=[parts]),
        "no generation prompt": PromptSource(messages=[first, answer], add_generation_prompt=False),
    }


def _prompts(special_token: str) -> dict[str, PromptSource]:
    return {
        "a plain prompt": PromptSource(prompt=_HARD_TEXT),
        "a plain prompt with a special token in it": PromptSource(prompt=f"One {special_token} two"),
    }


async def check_parity(prefix: PrefixService, replica_id: ReplicaId, model: str, tokenize: Tokenize) -> Parity:
    """Compare a replica in token mode with what `prefix` makes of the same prompts. What `tokenize` raises, passes.

    `model` is the name to send. The comparison covers the piecewise tokenization, pieces known and not.
    """
    vocabulary = await prefix.vocabulary_of(replica_id)
    assert vocabulary is not None, "a replica in text mode has nothing to compare"
    special = vocabulary.renderer.bundle.special_tokens
    probes = _prompts(special.get("eos_token") or special.get("bos_token") or "</s>")
    if vocabulary.renderer.has_chat_template:
        probes = {**_chats(), **probes}
    for name, source in probes.items():
        difference = await _difference(prefix, replica_id, model, source, tokenize)
        if difference is not None:
            return Parity(mismatch=f"its tokens for the probe {name!r} are not ours: {difference}")
    if not vocabulary.renderer.has_chat_template:
        return Parity()
    with_tools = PromptSource(messages=[{"role": "user", "content": "Look up 'warm'."}], tools=[_TOOL])
    difference = await _difference(prefix, replica_id, model, with_tools, tokenize)
    return Parity(tools_mismatch=difference and f"its tokens for a chat with tools are not ours: {difference}")


async def _difference(
    prefix: PrefixService, replica_id: ReplicaId, model: str, source: PromptSource, tokenize: Tokenize
) -> str | None:
    theirs = await tokenize(_body(source, model))
    packed = None if theirs is None else pack_ids(theirs)
    for _ in range(2):  # the second time from remembered pieces
        try:
            ours = await prefix.packed_ids(replica_id, source)
        except PromptError as error:
            return None if theirs is None else f"we can't render it ({error.message})"
        if theirs is None:
            return "it refuses this prompt, and we do not"
        if ours != packed:
            return _first_difference(ours, packed or b"")
    return None


def _first_difference(ours: bytes, theirs: bytes) -> str:
    our_ids, their_ids = memoryview(ours).cast("I").tolist(), memoryview(theirs).cast("I").tolist()
    pairs = zip(our_ids, their_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(our_ids), len(their_ids)))
    return f"{len(their_ids)} ids there and {len(our_ids)} here, equal up to number {at}"


def _body(source: PromptSource, model: str) -> dict[str, Any]:
    if source.messages is None:
        return {"model": model, "prompt": source.prompt, "add_special_tokens": True}
    body: dict[str, Any] = {
        "model": model,
        "messages": list(source.messages),
        "add_generation_prompt": source.add_generation_prompt,
        "add_special_tokens": False,
    }
    if source.tools:
        body["tools"] = list(source.tools)
    return body
