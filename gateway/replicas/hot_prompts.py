"""Prompts worth having warm, kept for replay: bodies of served requests, in memory only and bounded.

A replica that comes back has an empty cache, and one that leaves takes its cache with it. What was asked for lately
says what will be asked for next, but block keys don't give prompts back, so the bodies themselves are kept. That is why
it is off by default (the setting warmup_store_bytes): prompts then stay in the gateway's memory after their answers.
They go nowhere else: not to disk, logs, metrics or other gateways; and they are kept without the clients' credentials.

A later turn of a conversation replaces the earlier one. The heat of a block is how often the kept requests used it, so
what many share (system prompts, tools) is hottest. `hottest` takes the prompt that adds most heat, then the one that
adds most to that, and so on: two prompts that share everything are not replayed both.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.prefix.source import PromptSource
from policies.types import BlockKey

_KEY_BYTES = 48  # a key in a tuple, roughly
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
# What shapes the answer and not the prompt, and would make a replay longer or stricter than it need be.
_LEFT_OUT = ("stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "response_format", "stop", "store")


@dataclass(frozen=True, slots=True)
class HotPrompt:
    """A request that was served. `keys` are its blocks where it was served; `num_uses` counts it and earlier turns."""

    path: str
    model: str
    body: bytes
    source: PromptSource
    keys: tuple[BlockKey, ...]
    num_tokens: int
    session: str | None
    num_uses: int = 1

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.body) + _KEY_BYTES * len(self.keys)  # the source holds the text once more


class HotPrompts:
    """The youngest prompts within `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[BlockKey, HotPrompt] = OrderedDict()  # by the last key, the youngest last
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def note(self, prompt: HotPrompt) -> None:
        """A request was served. Prompts shorter than a block are nothing to keep."""
        if not prompt.keys:
            return
        earlier = next((key for key in reversed(prompt.keys) if key in self._prompts), None)
        if earlier is not None:
            old = self._drop(earlier)
            prompt = HotPrompt(
                prompt.path, prompt.model, prompt.body, prompt.source, prompt.keys, prompt.num_tokens, prompt.session,
                old.num_uses + 1,
            )  # fmt: skip
        if prompt.num_bytes > self._max_bytes:
            return
        self._prompts[prompt.keys[-1]] = prompt
        self.num_bytes += prompt.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._prompts)))

    def _drop(self, key: BlockKey) -> HotPrompt:
        prompt = self._prompts.pop(key)
        self.num_bytes -= prompt.num_bytes
        return prompt

    def of(self, models: frozenset[str]) -> list[HotPrompt]:
        """Those for one of `models`, the youngest first."""
        return [prompt for prompt in reversed(self._prompts.values()) if prompt.model in models]

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(prompt.num_bytes for prompt in self._prompts.values()) <= self._max_bytes
        assert all(prompt.keys[-1] == key for key, prompt in self._prompts.items())


def hottest(prompts: Sequence[HotPrompt], max_tokens: int) -> list[HotPrompt]:
    """The prompts that together cover most heat, in the order of what they add, within `max_tokens` new tokens.

    Greedy with lazy updates: what a prompt adds only shrinks as others are taken. Pure, and slow enough for a thread.
    """
    heat: Counter[BlockKey] = Counter()
    for prompt in prompts:
        for key in prompt.keys:
            heat[key] += prompt.num_uses
    covered: set[BlockKey] = set()
    gains = [(-sum(heat[key] for key in prompt.keys), place) for place, prompt in enumerate(prompts)]
    heapq.heapify(gains)
    chosen: list[HotPrompt] = []
    while gains:
        gain, place = heapq.heappop(gains)
        prompt = prompts[place]
        new = [key for key in prompt.keys if key not in covered]
        now = -sum(heat[key] for key in new)
        if now > gain:
            if now < 0:
                heapq.heappush(gains, (now, place))
            continue
        tokens = prompt.num_tokens * len(new) // len(prompt.keys)
        if not new or tokens > max_tokens:
            continue
        max_tokens -= tokens
        covered.update(new)
        chosen.append(prompt)
    return chosen


def replay_body(body: bytes) -> bytes:
    """The same prompt for one token of answer, in one piece. What is kept is kept byte for byte."""
    fields = _RAW.decode(body)
    for name in _LEFT_OUT:
        fields.pop(name, None)
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    fields[limit] = msgspec.Raw(b"1")
    return msgspec.json.encode(fields)
