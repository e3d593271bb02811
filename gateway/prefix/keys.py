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

from xxhash import xxh3_128_intdigest

from policies.types import BlockKey, PrefixChain

KEY_BYTES = 16
ID_BYTES = 4

# A text block stands for this many tokens: English text in BPE has close to four bytes a token.
TEXT_BYTES_PER_TOKEN = 4


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


def block_keys(parent: BlockKey, data: bytes, block_bytes: int) -> list[BlockKey]:
    """Keys of the full blocks of `data` behind `parent`, in order. A rest shorter than a block has no key."""
    assert block_bytes > 0
    keys: list[BlockKey] = []
    key: int = parent
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        key = xxh3_128_intdigest(key.to_bytes(KEY_BYTES, "little") + data[start : start + block_bytes])
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
