"""Prompts of a trace as text, and the tokenizer that reads them: equal blocks are equal text, others are not.

A word is three letters and a blank, four bytes, one token. A block of B trace tokens is `B / compress` words: the first
three spell its id, the others follow from it. The rest of a prompt behind its known blocks is text nobody else has. So
a gateway that counts four bytes a token, one that looks at characters, and one with the real tokenizer all see
prefixes equal exactly where the trace has them equal.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, replace

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from engine_worker.contract.state import TokenizerBundle
from loadtest.sim.trace import Trace, TraceRequest

WORD_BYTES = 4
WORDS = tuple(a + b + c for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou" for c in "bcdfghjklmnpqrstvwxz")
SPELLED = 3
NUM_IDS = len(WORDS) ** SPELLED
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_MODEL_LEN = 10_000_000
_INDEX = {word: number for number, word in enumerate(WORDS)}


@dataclass(frozen=True, slots=True)
class Wording:
    """`block_tokens` of the trace to a block, `compress` of them to a word. Raises ValueError."""

    block_tokens: int
    compress: int

    def __post_init__(self) -> None:
        if self.compress < 1 or self.block_tokens % self.compress or self.block_words < SPELLED:
            raise ValueError(
                f"--compress {self.compress}: it must divide the trace's blocks of {self.block_tokens} tokens and "
                f"leave {SPELLED} words to a block"
            )

    @property
    def block_words(self) -> int:
        return self.block_tokens // self.compress

    @property
    def block_chars(self) -> int:
        return self.block_words * WORD_BYTES

    def block(self, block_id: int) -> str:
        """The text of a trace's block."""
        return _block(block_id, self.block_words)

    def num_words(self, request: TraceRequest) -> int:
        """Length of its prompt. The rest behind full blocks stays shorter than a block."""
        full, rest = divmod(request.num_prompt_tokens, self.block_tokens)
        return max(full * self.block_words + min(-(-rest // self.compress), self.block_words - 1), 1)

    def output_words(self, request: TraceRequest) -> int:
        return max(round(request.num_output_tokens / self.compress), 1)

    def prompt(self, request: TraceRequest, unique: object) -> str:
        """`unique` names the request: what follows its blocks belongs to it alone."""
        blocks = "".join([self.block(block_id) for block_id in request.block_ids])
        num_left = self.num_words(request) - len(blocks) // WORD_BYTES
        return blocks + _said(random.Random(f"rest/{unique}"), num_left)

    def cut(self, text: str) -> tuple[int, list[str]]:
        """A prompt's words, and the text of each of its full blocks."""
        size = self.block_chars
        ends = range(size, len(text) + 1, size)
        return -(-len(text) // WORD_BYTES), [text[end - size : end] for end in ends]

    def as_served(self, trace: Trace) -> Trace:
        """The trace with the lengths that words can say: what the fleet really gets, for a simulation beside it."""
        sessions = tuple(tuple(map(self._as_served, session)) for session in trace.sessions)
        return replace(trace, sessions=sessions)

    def _as_served(self, request: TraceRequest) -> TraceRequest:
        prompt, output = self.num_words(request) * self.compress, self.output_words(request) * self.compress
        return replace(request, num_prompt_tokens=prompt, num_output_tokens=output)


@functools.lru_cache(maxsize=20_000)
def _block(block_id: int, num_words: int) -> str:
    if not 0 <= block_id < NUM_IDS:
        raise ValueError(f"block id {block_id} can't be spelled in {SPELLED} words")
    low, middle, high = block_id % 2000, block_id // 2000 % 2000, block_id // 4_000_000
    spelled = f"{WORDS[high]} {WORDS[middle]} {WORDS[low]} "
    return spelled + _said(random.Random(block_id), num_words - SPELLED)


def _said(rng: random.Random, num_words: int) -> str:
    return "".join([word + " " for word in rng.choices(WORDS, k=num_words)]) if num_words > 0 else ""


def token_ids(text: str) -> tuple[int, ...]:
    """As the tokenizer has them."""
    return tuple([_INDEX[word] for word in text.split()])


@functools.cache
def tokenizer_bundle() -> TokenizerBundle:
    """One token a word. A chat is what its messages say, one after the other."""
    vocabulary = {**_INDEX, "?": len(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    text = json.dumps(json.loads(tokenizer.to_str()), separators=(",", ":"))
    return TokenizerBundle(
        fingerprint="words-1",
        tokenizer_json=text,
        chat_template=TEMPLATE,
        special_tokens={},
        max_model_len=MAX_MODEL_LEN,
    )
