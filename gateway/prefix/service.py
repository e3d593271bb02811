"""Prompts to chains of block keys, one chain for every key space that the fleet's replicas live in.

A key space is one way to cut prompts. Replicas with the same model, tokenizer bundle and block size share one (and the
router's index then sees that they hold the same blocks); another template, another tokenizer version or another block
size is another space, so stale keys can't match. A replica without a tokenizer is in its model's text space.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from engine_worker.contract.prompt import PromptError
from engine_worker.contract.state import TokenizerBundle
from gateway.prefix.canonical import canonical_prompt
from gateway.prefix.keys import text_chain, text_root, token_chain, token_root
from gateway.prefix.source import PromptSource
from gateway.prefix.vocabulary import Vocabulary
from policies.types import BlockKey, KeySpace, PrefixChain, ReplicaId

log = logging.getLogger(__name__)

TEXT_BLOCK_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Space:
    """One cut. `tokenizer` is the bundle's digest, "" in text mode; `block_tokens` an estimate there."""

    key_space: KeySpace
    model: str
    tokenizer: str
    block_tokens: int

    def root(self, adapter: str, salt: str) -> BlockKey:
        """The root of token chains in this space."""
        assert self.tokenizer, "text spaces have a root for each kind of prompt"
        return token_root(self.model, self.tokenizer, adapter, salt)


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counters since the start, for metrics. Prompts are counted once a vocabulary."""

    num_prompts: int
    num_failed: int
    num_inline: int
    num_threaded: int
    num_piece_hits: int
    num_piece_misses: int
    num_cached_bytes: int


class PrefixService:
    """Keeps the fleet's vocabularies and cuts prompts. One event loop's; `close` it when done.

    cache_bytes  bound of each vocabulary's piece cache
    """

    def __init__(self, *, num_threads: int = 2, cache_bytes: int = 64 * 2**20) -> None:
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="prefix")
        self._cache_bytes = cache_bytes
        self._vocabularies: dict[str, asyncio.Future[Vocabulary]] = {}
        self._spaces: dict[KeySpace, Space] = {}
        self._replicas: dict[ReplicaId, KeySpace] = {}
        self._num_prompts = 0
        self._num_failed = 0

    async def register(
        self, replica_id: ReplicaId, model: str, bundle: TokenizerBundle | None, block_size: int = 0
    ) -> Space:
        """Put a replica into its key space: token mode with a bundle and a block size, text mode without.

        `model` is the replica's own name for its base model. Registering again moves the replica. Raises ValueError
        where the bundle's tokenizer can't be read (register without it then).
        """
        if bundle is None or block_size <= 0:
            space = Space(KeySpace(f"text:{TEXT_BLOCK_TOKENS}:{model}"), model, "", TEXT_BLOCK_TOKENS)
        else:
            digest = bundle_digest(bundle)
            # Put back, should its last other replica have left while it was built.
            self._vocabularies[digest] = await self._built(digest, bundle)
            space = Space(KeySpace(f"tokens:{digest[:16]}:{block_size}:{model}"), model, digest, block_size)
        self._spaces[space.key_space] = space
        self._replicas[replica_id] = space.key_space
        self._forget_unused()
        return space

    def unregister(self, replica_id: ReplicaId) -> None:
        """Forget a replica, and with the last one of a space the space and its tokenizer."""
        self._replicas.pop(replica_id, None)
        self._forget_unused()

    def space_of(self, replica_id: ReplicaId) -> Space | None:
        key_space = self._replicas.get(replica_id)
        return None if key_space is None else self._spaces[key_space]

    async def vocabulary_of(self, replica_id: ReplicaId) -> Vocabulary | None:
        """The replica's tokenizer; None in text mode."""
        space = self.space_of(replica_id)
        return await self._vocabularies[space.tokenizer] if space is not None and space.tokenizer else None

    async def packed_ids(self, replica_id: ReplicaId, source: PromptSource) -> bytes:
        """The prompt's ids as u32 little-endian, for a replica in token mode. Raises PromptError."""
        vocabulary = await self.vocabulary_of(replica_id)
        assert vocabulary is not None, "a replica in text mode has no ids"
        return await vocabulary.packed_ids(source, self._pool)

    async def chains(self, source: PromptSource, spaces: Iterable[KeySpace]) -> dict[KeySpace, PrefixChain]:
        """A chain for each of `spaces` that is known and that the prompt can be cut for. Never raises for a prompt.

        A prompt that can't be rendered has no token-mode chain: its replica will answer it with the reason.
        """
        wanted, result = self._known(source, spaces)
        packed: dict[str, bytes | None] = {}
        for tokenizer in {space.tokenizer for space in wanted if space.tokenizer}:
            packed[tokenizer] = await self._packed_ids(tokenizer, source)
        _cut(source, wanted, packed, result)
        return result

    def chains_now(self, source: PromptSource, spaces: Iterable[KeySpace]) -> dict[KeySpace, PrefixChain] | None:
        """The same without waiting; None where a prompt is so long that its ids take a thread."""
        wanted, result = self._known(source, spaces)
        packed: dict[str, bytes | None] = {}
        for space in wanted:
            tokenizer = space.tokenizer
            if tokenizer and tokenizer not in packed:
                packed[tokenizer] = ids = self._packed_now(tokenizer, source)
                if ids is None:
                    return None
        _cut(source, wanted, packed, result)
        return result

    def stats(self) -> PrefixStats:
        loaded = [future.result() for future in self._vocabularies.values() if future.done() and not future.exception()]
        return PrefixStats(
            num_prompts=self._num_prompts,
            num_failed=self._num_failed,
            num_inline=sum(vocabulary.num_inline for vocabulary in loaded),
            num_threaded=sum(vocabulary.num_threaded for vocabulary in loaded),
            num_piece_hits=sum(vocabulary.num_hits for vocabulary in loaded),
            num_piece_misses=sum(vocabulary.cache.num_misses for vocabulary in loaded),
            num_cached_bytes=sum(vocabulary.num_cached_bytes for vocabulary in loaded),
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_invariants(self) -> None:
        assert set(self._replicas.values()) == set(self._spaces)
        assert {space.tokenizer for space in self._spaces.values() if space.tokenizer} <= set(self._vocabularies)

    async def _built(self, digest: str, bundle: TokenizerBundle) -> asyncio.Future[Vocabulary]:
        """Built once, in a thread (large tokenizers take a second), even if several replicas ask together."""
        future = self._vocabularies.get(digest)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._pool, Vocabulary, bundle, self._cache_bytes)
            self._vocabularies[digest] = future
        try:
            await asyncio.shield(future)
        except Exception:
            self._vocabularies.pop(digest, None)
            raise
        return future

    def _known(
        self, source: PromptSource, spaces: Iterable[KeySpace]
    ) -> tuple[list[Space], dict[KeySpace, PrefixChain]]:  # fmt: skip
        """Chains of a chat whose beginning is known, and the spaces for which there is none of those."""
        left: list[Space] = []
        result: dict[KeySpace, PrefixChain] = {}
        counted = ""
        for key_space in spaces:
            space = self._spaces.get(key_space)
            if space is None:
                continue
            future = self._vocabularies.get(space.tokenizer) if space.tokenizer else None
            chain = None
            if future is not None and future.done() and not source.own_template:
                root = space.root(source.adapter, source.salt)
                chain = future.result().chain_now(source, root, space.block_tokens)
            if chain is None:
                left.append(space)
                continue
            result[key_space] = chain
            if space.tokenizer != counted:
                counted = space.tokenizer
                self._num_prompts += 1
        return left, result

    def _packed_now(self, digest: str, source: PromptSource) -> bytes | None:
        """None where that can't be told without waiting, or without saying why not."""
        future = self._vocabularies.get(digest)
        if source.own_template or future is None or not future.done():
            return None
        try:
            ids = future.result().packed_now(source)
        except Exception:
            return None
        self._num_prompts += ids is not None
        return ids

    async def _packed_ids(self, digest: str, source: PromptSource) -> bytes | None:
        if source.own_template:
            return None
        future = self._vocabularies.get(digest)
        if future is None:  # the space's last replica left a moment ago
            return None
        self._num_prompts += 1
        try:
            return await future.result().packed_ids(source, self._pool)
        except PromptError:
            self._num_failed += 1
        except Exception as error:
            # Routing without a chain still serves the request; the message may quote the prompt, so only its type.
            self._num_failed += 1
            log.error("cutting a prompt failed with %s; it is routed without a prefix", type(error).__name__)
        return None

    def _forget_unused(self) -> None:
        used = set(self._replicas.values())
        self._spaces = {key_space: space for key_space, space in self._spaces.items() if key_space in used}
        tokenizers = {space.tokenizer for space in self._spaces.values()}
        for digest in [digest for digest, future in self._vocabularies.items() if future.done()]:
            if digest not in tokenizers:
                del self._vocabularies[digest]


def _cut(
    source: PromptSource, wanted: Sequence[Space], packed: Mapping[str, bytes | None],
    result: dict[KeySpace, PrefixChain],
) -> None:  # fmt: skip
    """Chains in the `wanted` spaces, into `result`; `packed` has the prompt's ids by tokenizer, None where it can't be
    rendered."""
    kind, text = "", None
    for space in wanted:
        if space.tokenizer:
            data = packed[space.tokenizer]
            if data is not None:
                root = space.root(source.adapter, source.salt)
                result[space.key_space] = token_chain(root, data, space.block_tokens)
            continue
        if not kind:
            kind, text = canonical_prompt(source)
        if text is not None:
            root = text_root(kind, space.model, source.adapter, source.salt)
            result[space.key_space] = text_chain(root, text, space.block_tokens)


def bundle_digest(bundle: TokenizerBundle) -> str:
    """Names everything in a bundle that decides ids: tokenizer, template, special tokens and its own fingerprint."""
    fields = (bundle.fingerprint, bundle.tokenizer_json, bundle.chat_template, sorted(bundle.special_tokens.items()))
    return hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()
