"""Block keys: what the router calls a prompt prefix.

A key names everything up to the end of its block: `key = xxh3_128(parent key, 16 bytes little-endian + block)`. A token
block is its ids as u32 little-endian; a text block is a fixed number of UTF-8 bytes. The chain starts at a root that
hashes what else an engine's KV cache depends on (model, tokenizer, adapter, salt). Token and text roots differ, so
their keys never meet.

A collision of these keys can only send a request to a replica that is colder than thought; engines confirm their own
hits by token ids. So a fast hash is enough.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from xxhash import xxh3_128_intdigest

from policies.types import BlockKey, PrefixChain

KEY_BYTES: Final = 16
ID_BYTES: Final = 4

# So many blocks are looked up together before any of them is hashed by itself.
STRIDE_BLOCKS: Final = 8
MAX_STRIDES: Final = 8192  # in each generation: some 15 MB of keys at most, most of which the router's index has anyway

# A text block stands for this many tokens: English text in BPE has close to four bytes a token.
TEXT_BYTES_PER_TOKEN: Final = 4


def token_root(model: str, tokenizer: str, adapter: str = "", salt: str = "") -> BlockKey:
    """The root of token chains. `tokenizer` is the tokenizer's fingerprint."""
    return _root("tokens", model, tokenizer, adapter, salt)


def text_root(kind: str, model: str, adapter: str = "", salt: str = "") -> BlockKey:
    """The root of text chains. `kind` keeps chats, plain prompts and prompts given as ids apart."""
    return _root(f"text/{kind}", model, "", adapter, salt)


@functools.lru_cache(maxsize=1024)
def _root(*parts: str) -> BlockKey:
    # Each part with its length before it, so that no two lists of parts spell the same bytes.
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return BlockKey(xxh3_128_intdigest(b"".join(len(part).to_bytes(8, "little") + part for part in encoded)))


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as u32 little-endian. Raises OverflowError or TypeError where one is no such number."""
    packed = array("I", ids)
    assert packed.itemsize == ID_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Strides:
    """Keys of stretches that were cut before, by a digest of what they hang on: all but the last turns of a chat.

    Two generations bound it without a list of uses: when the young one is full it becomes the old one, and what is
    met again in the old one is young again.
    """

    __slots__ = ("_old", "_young", "max_strides")

    def __init__(self, max_strides: int = MAX_STRIDES) -> None:
        self.max_strides = max_strides
        self._young: dict[int, list[BlockKey]] = {}
        self._old: dict[int, list[BlockKey]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def keys(self, parent: int, data: bytes, start: int, block_bytes: int) -> list[BlockKey]:
        """Keys of STRIDE_BLOCKS full blocks from `start` on, behind `parent`. The list is not to be changed."""
        end = start + STRIDE_BLOCKS * block_bytes
        name = xxh3_128_intdigest(parent.to_bytes(KEY_BYTES, "little") + data[start:end])
        found = self._young.get(name)
        if found is None:
            found = self._old.pop(name, None)
            if found is None:
                found = _hashed(parent, data, start, end, block_bytes)
            if len(self._young) >= self.max_strides:
                self._old, self._young = self._young, {}
            self._young[name] = found
        return found

    def check_invariants(self) -> None:
        assert len(self._young) <= self.max_strides
        assert len(self._old) <= self.max_strides
        assert not self._young.keys() & self._old.keys()


_strides = Strides()


def block_keys(parent: BlockKey, data: bytes, block_bytes: int) -> list[BlockKey]:
    """Keys of the full blocks of `data` behind `parent`, in order. A rest shorter than a block has no key."""
    assert block_bytes > 0
    keys: list[BlockKey] = []
    key: int = parent
    stride_bytes = STRIDE_BLOCKS * block_bytes
    start, size = 0, len(data)
    while start + stride_bytes <= size:
        keys += _strides.keys(key, data, start, block_bytes)
        key = keys[-1]
        start += stride_bytes
    return keys + _hashed(key, data, start, size, block_bytes)


def fresh_keys(parent: BlockKey, data: bytes, block_bytes: int) -> list[BlockKey]:
    """The same, without a look at what was cut before or a trace of it."""
    return _hashed(parent, data, 0, len(data), block_bytes)


def _hashed(parent: int, data: bytes, start: int, end: int, block_bytes: int) -> list[BlockKey]:
    keys: list[BlockKey] = []
    key = parent
    for at in range(start, end - block_bytes + 1, block_bytes):
        key = xxh3_128_intdigest(key.to_bytes(KEY_BYTES, "little") + data[at : at + block_bytes])
        keys.append(BlockKey(key))
    return keys


def token_keys(parent: BlockKey, ids: Sequence[int], block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `block_size` ids behind `parent`."""
    return block_keys(parent, pack_ids(ids), block_size * ID_BYTES)


def token_chain(root: BlockKey, packed: bytes, block_size: int) -> PrefixChain:
    """The chain of a prompt whose ids are packed by `pack_ids`."""
    keys = block_keys(root, packed, block_size * ID_BYTES)
    return PrefixChain(keys=tuple(keys), block_tokens=block_size, num_tokens=len(packed) // ID_BYTES)


def text_chain(root: BlockKey, text: bytes, block_tokens: int) -> PrefixChain:
    """The chain of canonical prompt text, in blocks of about `block_tokens` tokens."""
    keys = block_keys(root, text, block_tokens * TEXT_BYTES_PER_TOKEN)
    num_tokens = -(-len(text) // TEXT_BYTES_PER_TOKEN)
    return PrefixChain(keys=tuple(keys), block_tokens=block_tokens, num_tokens=num_tokens)
