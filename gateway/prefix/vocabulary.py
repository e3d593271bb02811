"""One model's tokenizer in the gateway: a prompt's source to packed token ids, off the event loop where it is long.

Work is done on the event loop while it is short (a thread hop costs more than rendering and looking up a chat whose
pieces are known) and in a thread otherwise. Only the event loop's thread touches the piece cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from engine_worker.contract.prompt import PromptError, PromptRenderer, template_kwargs
from engine_worker.contract.state import TokenizerBundle
from gateway.prefix.keys import pack_ids
from gateway.prefix.known import KnownChats
from gateway.prefix.pieces import INLINE_ENCODE_CHARS, Pieces
from gateway.prefix.source import PromptSource
from gateway.prefix.tokenize import SegmentCache, Splitter, cuts_right, encode_piece
from gateway.prefix.turns import turns_of
from gateway.prefix.words import words_of
from policies.types import BlockKey, PrefixChain

INLINE_RENDER_CHARS = 32_000  # rendering and cutting copy the text a few times: tens of microseconds
SLOW_RENDER_S = 0.010  # a template that ever takes this long on a short chat renders in threads from then on

T = TypeVar("T")


class Vocabulary:
    """Prompt source to ids for one `TokenizerBundle`. Raises ValueError where its tokenizer can't be read.

    `num_inline` and `num_threaded` count prompts that were done on the event loop and ones that needed a thread.
    """

    def __init__(self, bundle: TokenizerBundle, cache_bytes: int) -> None:
        self.renderer = PromptRenderer(bundle, max_render_s=2.0)
        self.cache = SegmentCache(cache_bytes)
        self._splitter = Splitter(self.renderer.tokenizer)
        self.is_incremental = cuts_right(self.renderer, self._splitter)
        self._words = words_of(self.renderer, self._splitter) if self.is_incremental else None
        turns = turns_of(self.renderer) if self.is_incremental else None
        self._chats: KnownChats | None = None
        if turns is not None:
            pieces = Pieces(self.renderer, self._splitter, self._words, self.cache)
            self._chats = KnownChats(turns, pieces, cache_bytes // 2)
        self._around = _added_around(self.renderer)
        self._renders_slowly = False
        self.num_inline = 0
        self.num_threaded = 0

    @property
    def num_cached_bytes(self) -> int:
        return self.cache.num_bytes + (self._chats.places.num_bytes if self._chats is not None else 0)

    @property
    def num_hits(self) -> int:
        """Pieces and messages that were known; `cache.num_misses` counts pieces that weren't."""
        return self.cache.num_hits + (self._chats.num_known if self._chats is not None else 0)

    async def packed_ids(self, source: PromptSource, pool: Executor) -> bytes:
        """The prompt's ids as u32 little-endian. Raises PromptError where the prompt can't be rendered."""
        prompt = source.first_prompt()
        if source.messages is None and not isinstance(prompt, str):
            return _given_ids(prompt)
        if _adds_special_tokens(source) and self._around is None:
            return await self._hop(pool, lambda: pack_ids(self.renderer.encode(self._text(source), True)))
        short = self._is_short(source)
        pieces = self._timed_pieces(source) if short else await self._hop(pool, lambda: self._pieces(source))
        found, missing = self._look_up(pieces)
        fresh = self._encoded_here(missing)
        if fresh is None:
            fresh = await self._hop(pool, lambda: self._encode_all(missing))
        else:
            self.num_inline += 1
        return self._joined(source, pieces, found, fresh)

    def packed_now(self, source: PromptSource) -> bytes | None:
        """The same where the event loop can do it, else None."""
        prompt = source.first_prompt()
        if source.messages is None and not isinstance(prompt, str):
            return _given_ids(prompt)
        if (_adds_special_tokens(source) and self._around is None) or not self._is_short(source):
            return None
        pieces = self._timed_pieces(source)
        found, missing = self._look_up(pieces)
        fresh = self._encoded_here(missing)
        if fresh is None:
            return None
        self.num_inline += 1
        return self._joined(source, pieces, found, fresh)

    def chain_now(self, source: PromptSource, root: BlockKey, block_tokens: int) -> PrefixChain | None:
        """The chain of a chat behind `root`, made of what is known of its beginning; None where that can't be done."""
        if (
            self._chats is None or source.messages is None or source.tools or source.chat_template_kwargs
            or source.reasoning_effort or source.continue_final_message or source.add_special_tokens
        ):  # fmt: skip
            return None
        chain = self._chats.chain(source.messages, source.add_generation_prompt, root, block_tokens)
        self.num_inline += chain is not None
        return chain

    def _is_short(self, source: PromptSource) -> bool:
        return not self._renders_slowly and _num_chars(source) <= INLINE_RENDER_CHARS

    def _look_up(self, pieces: list[str]) -> tuple[list[bytes | None], set[str]]:
        """The ids of the pieces, as far as they are known, and the pieces of which they aren't."""
        found = [self.cache.get(piece) for piece in pieces]
        return found, {piece for piece, packed in zip(pieces, found, strict=True) if packed is None}

    def _encoded_here(self, missing: set[str]) -> dict[str, bytes] | None:
        """None where they are too long for the event loop."""
        fresh: dict[str, bytes] = {}
        if self._words is not None:
            for piece in missing:
                ids = self._words.packed(piece)
                if ids is not None:
                    fresh[piece] = ids
            missing = missing.difference(fresh)
        if sum(map(len, missing)) > INLINE_ENCODE_CHARS:
            return None
        return {**fresh, **self._encode_all(missing)}

    def _joined(
        self, source: PromptSource, pieces: list[str], found: list[bytes | None], fresh: dict[str, bytes]
    ) -> bytes:  # fmt: skip
        """All ids, with what the tokenizer adds before and after, where it does."""
        ids = self._together(pieces, found, fresh)
        if self._around is None or not _adds_special_tokens(source):
            return ids
        return self._around[0] + ids + self._around[1]

    def _together(self, pieces: list[str], found: list[bytes | None], fresh: dict[str, bytes]) -> bytes:
        for piece, packed in fresh.items():
            self.cache.put(piece, packed)
        return b"".join([fresh[piece] if old is None else old for piece, old in zip(pieces, found, strict=True)])

    async def _hop(self, pool: Executor, work: Callable[[], T]) -> T:
        self.num_threaded += 1
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _timed_pieces(self, source: PromptSource) -> list[str]:
        started = time.thread_time()  # a wall clock would take a busy machine for a slow template
        try:
            return self._pieces(source)
        finally:
            self._renders_slowly = time.thread_time() - started > SLOW_RENDER_S

    def _pieces(self, source: PromptSource) -> list[str]:
        text = self._text(source)
        return self._splitter.split(text) if self.is_incremental else [text]

    def _text(self, source: PromptSource) -> str:
        if source.messages is None:
            prompt = source.first_prompt()
            assert isinstance(prompt, str)
            return prompt
        return self.renderer.render_chat(
            source.messages,
            source.tools,
            source.add_generation_prompt and not source.continue_final_message,
            source.continue_final_message,
            template_kwargs(source.chat_template_kwargs, source.reasoning_effort),
        )

    def _encode_all(self, pieces: set[str]) -> dict[str, bytes]:
        return {piece: encode_piece(self.renderer, piece) for piece in pieces}


def _adds_special_tokens(source: PromptSource) -> bool:
    told = source.add_special_tokens
    return source.messages is None if told is None else told


def _given_ids(prompt: object) -> bytes:
    try:
        return pack_ids(prompt or ())  # type: ignore[arg-type]  # the client's; what is no list of ids is refused here
    except (OverflowError, TypeError) as error:
        raise PromptError("Token ids must be integers from 0 up.", param="prompt") from error


def _num_chars(source: PromptSource) -> int:
    """About how much text there is to render. Tools count by the piece: their JSON is not measured, only feared."""
    if source.messages is None:
        return len(source.prompt) if isinstance(source.prompt, str) else INLINE_RENDER_CHARS
    num_chars = 200 * len(source.messages) + 2_000 * len(source.tools or ())
    for message in source.messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            num_chars += len(content)
        elif isinstance(content, list | tuple):  # what is neither is refused where it is rendered
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            num_chars += sum(len(text) for text in texts if isinstance(text, str))
    return num_chars


def _added_around(renderer: PromptRenderer) -> tuple[bytes, bytes] | None:
    """What the post-processor puts before and after a text, packed; None where it does something else to it."""
    around: tuple[list[int], list[int]] | None = None
    for probe in ("a", "Hello, world", "1 2 3", ""):
        plain = renderer.encode(probe, add_special_tokens=False)
        full = renderer.encode(probe, add_special_tokens=True)
        starts = range(len(full) - len(plain) + 1)
        start = next((i for i in starts if full[i : i + len(plain)] == plain), None)
        if around is None:
            if start is None:
                return None
            around = full[:start], full[start + len(plain) :]
        elif around[0] + plain + around[1] != full:
            return None
    assert around is not None
    return pack_ids(around[0]), pack_ids(around[1])
