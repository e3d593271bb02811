"""Conversations that share a long system prompt: the load for which routing by prefix matters.

All of it is drawn from one seed: the system prompt that everyone shares, what each user brings along (a document in
the first turn), the questions, and the order in which users come back, which is interleaved as people's thinking times
would. Answers are the model's own and become part of the next prompt, as in a real chat.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtest.client import Message
from loadtest.records import Record

VOCABULARY = (
    "the a our each this that light water city garden river stone letter music winter summer paper window street "
    "market teacher captain doctor farmer painter island valley forest engine bridge mirror silver copper gentle quiet "
    "early late small large old new warm cold finds keeps brings turns opens closes carries follows reads writes "
    "builds sends with from under over near beyond before after while because and or but then also often never always "
    "morning evening story answer question number pattern reason result order shape sound road house door table"
)
WORDS = VOCABULARY.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much of what. Lengths in words, each of which is about one token of an English tokenizer."""

    num_conversations: int = 8
    num_turns: int = 4
    system_words: int = 850
    document_words: int = 320
    question_words: int = 40
    answer_tokens: int = 12
    concurrency: int = 4
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Script:
    """What the users will say (`questions[conversation][turn]`) and who comes when (conversation numbers)."""

    system: str
    questions: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


def write_script(shape: Shape) -> Script:
    rng = random.Random(shape.seed)
    system = "You are a helpful assistant. Answer in one short sentence. " + prose(rng, shape.system_words)
    questions = tuple(
        tuple(_question(rng, shape, turn) for turn in range(shape.num_turns)) for _ in range(shape.num_conversations)
    )
    return Script(system, questions, tuple(_order(rng, shape)))


def prose(rng: random.Random, num_words: int) -> str:
    """Sentences of common words: a tokenizer needs about one token a word."""
    sentences, left = [], num_words
    while left > 0:
        length = min(left, rng.randint(6, 14))
        sentences.append(" ".join(rng.choices(WORDS, k=length)).capitalize() + ".")
        left -= length
    return " ".join(sentences)


def _question(rng: random.Random, shape: Shape, turn: int) -> str:
    document = f"Here is a text. {prose(rng, shape.document_words)} " if turn == 0 else ""
    return f"{document}{prose(rng, shape.question_words)} What is it about?"


def _order(rng: random.Random, shape: Shape) -> list[int]:
    """Rounds of all conversations, each round in another order: nobody talks twice while another waits for a round."""
    order: list[int] = []
    for _ in range(shape.num_turns):
        order += rng.sample(range(shape.num_conversations), shape.num_conversations)
    return order


Ask = Callable[[Sequence[Message], int, int], Awaitable[Record]]


async def play(script: Script, shape: Shape, ask: Ask, progress: Callable[[int], None]) -> list[Record]:
    """Everyone's turns in the script's order, `concurrency` at a time. `ask(messages, conversation, turn)` sends one.

    A conversation's next turn waits for its last answer; a turn that failed ends its conversation.
    """
    history: list[list[Message]] = [[{"role": "system", "content": script.system}] for _ in script.questions]
    locks = [asyncio.Lock() for _ in script.questions]
    turns = [0] * len(script.questions)
    waiting = iter(script.order)
    records: list[Record] = []

    async def user() -> None:
        for number in waiting:
            async with locks[number]:
                if turns[number] < 0:
                    continue
                messages, turn = history[number], turns[number]
                messages.append({"role": "user", "content": script.questions[number][turn]})
                record = await ask(messages, number, turn)
                records.append(record)
                progress(len(records))
                messages.append({"role": "assistant", "content": record.text})
                turns[number] = -1 if record.error else turn + 1

    async with asyncio.TaskGroup() as group:
        for _ in range(shape.concurrency):
            group.create_task(user())
    return records
