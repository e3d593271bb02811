"""Piecewise tokenization must give the ids of the whole, on any text, with every tokenizer it says yes to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from gateway.prefix.keys import pack_ids
from gateway.prefix.tokenize import SegmentCache, Splitter, cuts_right, encode_piece
from tests.support.tiny_tokenizer import tiny_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>\n<|end|>", "<mask>", "fox", "<think>", "<tool>"]
TEXTS = st.lists(
    st.sampled_from(
        [*SPECIAL, "<|im_", "end|>", "<", "|>", "\n", " ", "  ", "the quick brown", "Größe", "🙂", "日本", "0123"]
    )
    | st.text(max_size=8),
    max_size=12,
).map("".join)


def renderer_of(tokenizer: Tokenizer) -> PromptRenderer:
    return PromptRenderer(
        TokenizerBundle(
            fingerprint="x",
            tokenizer_json=tokenizer.to_str(),
            chat_template=None,
            special_tokens={},
            max_model_len=100,
        )
    )


RENDERERS = {kind: renderer_of(tiny_tokenizer(kind=kind)) for kind in ("bytes", "metaspace")}
SPLITTERS = {kind: Splitter(renderer.tokenizer) for kind, renderer in RENDERERS.items()}


@pytest.mark.parametrize("kind", RENDERERS)
@settings(max_examples=300)
@given(text=TEXTS)
def test_pieces_have_the_ids_of_the_whole(kind: str, text: str) -> None:
    renderer, splitter = RENDERERS[kind], SPLITTERS[kind]
    pieces = splitter.split(text)
    assert "".join(pieces) == text
    assert all(pieces)
    assert all(piece.startswith(tuple(splitter.cut_at)) for piece in pieces[1:])
    ids = pack_ids(renderer.encode(text, add_special_tokens=False))
    assert b"".join(encode_piece(renderer, piece) for piece in pieces) == ids


@pytest.mark.parametrize("kind", RENDERERS)
def test_the_self_check_passes_where_cutting_is_right(kind: str) -> None:
    assert cuts_right(RENDERERS[kind], SPLITTERS[kind])


def test_cuts_are_made_before_plain_special_tokens_only() -> None:
    splitter = SPLITTERS["bytes"]
    assert splitter.split("a<s>b<|im_end|>c <mask>d fox<think>e") == [
        "a",
        "<s>b",
        "<|im_end|>c <mask>d fox",
        "<think>e",
    ]
    assert splitter.split("x<|im_end|>\n<|end|>y<|im_end|>\n") == ["x<|im_end|>\n<|end|>y", "<|im_end|>\n"]
    assert splitter.split("") == []
    assert splitter.cut_at.isdisjoint({"<mask>", "fox", "<|im_end|>\n<|end|>"})


def test_the_self_check_notices_a_wrong_cut() -> None:
    """A splitter that cuts inside words, as if a common letter were a special token."""
    renderer = RENDERERS["bytes"]
    splitter = Splitter(renderer.tokenizer)
    splitter.split = lambda text: [piece for word in text.partition("e") if (piece := word)]  # type: ignore[method-assign]
    assert not cuts_right(renderer, splitter)


def test_a_tokenizer_with_word_bound_tokens_is_used_whole() -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("<w>", single_word=True, special=True)])
    assert Splitter(tokenizer).split("a<s>b") == ["a<s>b"]


def test_the_cache_gives_back_what_was_put_and_forgets_the_oldest() -> None:
    cache = SegmentCache(max_bytes=3 * 240)
    for name in "abc":
        cache.put(name, name.encode() * 40)
    assert cache.get("a") == b"a" * 40
    cache.put("d", b"d" * 40)
    assert [cache.get(name) for name in "abcd"] == [b"a" * 40, None, b"c" * 40, b"d" * 40]
    cache.put("d", b"never stored twice")
    assert cache.get("d") == b"d" * 40
    assert (cache.num_hits, cache.num_misses, len(cache)) == (5, 1, 3)
    cache.check_invariants()
    cache.put("huge", b"h" * 4000)
    assert len(cache) == 0, "what can't fit is not kept"
    cache.check_invariants()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60)), max_size=60))
def test_the_cache_never_holds_more_than_it_may(steps: list[tuple[str, int]]) -> None:
    cache = SegmentCache(max_bytes=1000)
    for name, size in steps:
        if cache.get(name) is None:
            cache.put(name, b"1234" * size)
        cache.check_invariants()
