"""What clients ask, and what the true answer is: both follow from the seed and the request's number. Pure.

A fake worker's n-th token is ` TAGtN`, TAG being the request's own, so that a token of another request shows too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Habit = Literal["plain", "leaves", "slow", "impatient"]

_HABITS: dict[Habit, float] = {"plain": 0.70, "leaves": 0.12, "slow": 0.06, "impatient": 0.12}
_WORDS = ("river", "stone", "lamp", "orchard", "signal", "harbor", "window", "thread", "copper", "meadow")
_NUM_TOPICS = 12  # prompts share beginnings, as conversations do
_MAX_RETRIES = 2


@dataclass(frozen=True, slots=True)
class Truth:
    """A whole answer: its text, and how many tokens it has (None: unknown)."""

    text: str
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client.

    gateway    which one the client likes best
    leave_at   ("leaves") the number of tokens after which it goes; -1: before the first one, after `patience_s`
    patience_s ("impatient", "leaves") how long it waits for a first token before it asks again, `num_retries` times
    """

    number: int
    path: str
    body: Mapping[str, Any]
    truth: Truth
    habit: Habit
    gateway: int
    leave_at: int = 0
    patience_s: float = 0.0
    num_retries: int = 0

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("chat/completions")


def numbered(tag: str, num_tokens: int) -> Truth:
    return Truth("".join([f" {tag}t{n}" for n in range(num_tokens)]), num_tokens)


def ask(seed: int, number: int, model: str, known: Sequence[tuple[str, Truth, int]] = ()) -> Ask:
    """Request `number` of the run. `known` are prompts with their true (chat) answers and lengths: for real engines."""
    rng = random.Random(f"ask/{seed}/{number}")
    [habit] = rng.choices(list(_HABITS), weights=list(_HABITS.values()))
    stream = habit in ("slow",) or rng.random() < 0.75
    is_chat = bool(known) or rng.random() < 0.7
    num_tokens = rng.randrange(40, 160) if rng.random() < 0.15 or habit == "slow" else rng.randrange(1, 16)
    body: dict[str, Any] = {"model": model, "stream": stream, "temperature": 0}
    if stream and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    if known:
        prompt, truth, num_tokens = known[rng.randrange(len(known))]
    else:
        tag = f"q{number}"
        topic = random.Random(f"topic/{seed}/{rng.randrange(_NUM_TOPICS)}")
        prompt = " ".join(topic.choices(_WORDS, k=rng.choice((20, 200, 600)))) + f" {tag}"
        truth = numbered(tag, num_tokens)
        body["fake_tag"] = tag
    body["max_tokens"] = num_tokens
    if is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    leave_at = rng.choice((-1, 1, max(1, num_tokens // 2))) if stream else -1
    patience_s = rng.uniform(1.5, 4.0) if habit == "impatient" else rng.uniform(0.0, 0.1)
    return Ask(
        number=number,
        path="/v1/chat/completions" if is_chat else "/v1/completions",
        body=body,
        truth=truth,
        habit=habit,
        gateway=rng.randrange(2),
        leave_at=leave_at,
        patience_s=patience_s,
        num_retries=_MAX_RETRIES if habit == "impatient" else 0,
    )
