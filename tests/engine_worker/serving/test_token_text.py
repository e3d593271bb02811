"""Text comes out whole: the same as decoding all tokens at once, with no character split and none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_worker.serving.token_text import TokenText
from tests.engine_worker.serving.fake_engine import make_tokenizer
from tests.support.tiny_tokenizer import tiny_tokenizer


def byte_fallback_tokenizer(*, strip: bool) -> Tokenizer:
    """As Llama 2 and Gemma have it: pieces with a visible space, and a token for each byte."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁he",
        "llo",
        "▁world",
        "é",
        "▁▁",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "hello", "##ing", "world", "!", "##s", "é"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


BYTE_LEVEL = make_tokenizer()
BYTE_LEVEL_TEXT = TokenText(BYTE_LEVEL)
FALLBACK = byte_fallback_tokenizer(strip=False)
FALLBACK_TEXT = TokenText(FALLBACK)
WORDPIECE = wordpiece_tokenizer()
WORDPIECE_TEXT = TokenText(WORDPIECE)


def streamed(tokens: TokenText, ids: list[int], *, skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    stream = tokens.stream(skip, prompt or [])
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@given(st.text())
def test_byte_level_text_comes_back(text: str) -> None:
    parts = streamed(BYTE_LEVEL_TEXT, BYTE_LEVEL.encode(text).ids, skip=False)
    assert "".join(parts) == text
    assert parts[-1] == ""


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.booleans())
def test_byte_level_equals_decoding_at_once(ids: list[int], skip: bool) -> None:
    """Any ids, invalid UTF-8 and broken ends included."""
    assert "".join(streamed(BYTE_LEVEL_TEXT, ids, skip=skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text())
def test_a_real_bpe_equals_decoding_at_once(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(TokenText(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.text())
def test_byte_fallback_text_comes_back(text: str) -> None:
    ids = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(streamed(FALLBACK_TEXT, ids)) == text


@pytest.mark.parametrize("strip", [True, False])
def test_a_leading_space_follows_the_prompt(strip: bool) -> None:
    """Llama's decoder strips the first space of a text; the output is no text's beginning."""
    tokenizer = byte_fallback_tokenizer(strip=strip)
    ids = [tokenizer.token_to_id(piece) for piece in ("▁he", "llo", "▁world")]
    assert streamed(TokenText(tokenizer), ids) == [" he", "llo", " world", ""]


def test_an_emoji_comes_with_its_last_byte() -> None:
    ids = BYTE_LEVEL.encode("a😀b").ids
    assert streamed(BYTE_LEVEL_TEXT, ids) == ["a", "", "", "", "😀", "b", ""]


def test_two_emoji_side_by_side_in_byte_fallback() -> None:
    """tokenizers' own decoder makes replacement characters of both while the second is unfinished."""
    ids = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in "😀😀".encode()]
    assert streamed(FALLBACK_TEXT, ids[:-1]) == ["", "", "", "😀", "", "", "", "\ufffd"]


def test_an_end_inside_a_character_is_no_error() -> None:
    ids = BYTE_LEVEL.encode("日本").ids
    assert "".join(streamed(BYTE_LEVEL_TEXT, ids[:-1])) == "日\ufffd"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = BYTE_LEVEL.encode("a<|end|>b").ids
    assert "".join(streamed(BYTE_LEVEL_TEXT, ids)) == "ab"
    assert "".join(streamed(BYTE_LEVEL_TEXT, ids, skip=False)) == "a<|end|>b"


def test_a_special_token_does_not_end_a_character() -> None:
    first, *rest = BYTE_LEVEL.encode("é").ids
    ids = [first, BYTE_LEVEL.token_to_id("<|end|>"), *rest]
    assert "".join(streamed(BYTE_LEVEL_TEXT, ids)) == "é"


def test_padding_of_the_vocabulary_has_no_text() -> None:
    assert BYTE_LEVEL_TEXT.bytes_of(10**6) == b""
    assert streamed(BYTE_LEVEL_TEXT, [10**6]) == ["", ""]


def test_the_bytes_of_a_part_of_a_character() -> None:
    first = BYTE_LEVEL.encode("é").ids[0]
    assert BYTE_LEVEL_TEXT.bytes_of(first) == b"\xc3"
    assert BYTE_LEVEL_TEXT.string_of(first) == "\ufffd"


def test_which_decoders_are_exact() -> None:
    assert BYTE_LEVEL_TEXT.is_exact
    assert FALLBACK_TEXT.is_exact
    assert not WORDPIECE_TEXT.is_exact


@given(st.lists(st.integers(0, WORDPIECE.get_vocab_size() - 1), max_size=20))
def test_windowed_decoding_equals_decoding_at_once(ids: list[int]) -> None:
    prompt = WORDPIECE.encode("hello").ids
    whole = WORDPIECE.decode(prompt + ids, skip_special_tokens=True)
    assert "hello" + "".join(streamed(WORDPIECE_TEXT, ids, prompt=prompt)) == whole


def test_windowed_decoding_puts_spaces_between_words() -> None:
    ids = [WORDPIECE.token_to_id(word) for word in ("hello", "##s", "world")]
    assert "".join(streamed(WORDPIECE_TEXT, ids, prompt=[WORDPIECE.token_to_id("!")])) == " hellos world"
