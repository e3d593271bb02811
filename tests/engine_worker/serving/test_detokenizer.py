"""Stop strings never leak, logprobs stay beside their text, and every sequence ends exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving.detokenizer import Piece, SequenceText
from engine_worker.serving.token_text import TokenText
from tests.engine_worker.serving.fake_engine import make_tokenizer

TOKENIZER = make_tokenizer()
TOKENS = TokenText(TOKENIZER)
EOS = TOKENIZER.token_to_id("<|eos|>")


def sequence(
    *stops: str, include_stop: bool = False, min_tokens: int = 0, skip: bool = True, stop_ids: tuple[int, ...] = ()
) -> SequenceText:
    return SequenceText(
        TOKENS.stream(skip), stops, include_stop=include_stop, min_tokens=min_tokens, stop_token_ids=stop_ids
    )


def run(text: SequenceText, ids: list[int], end: FinishReason = FinishReason.LENGTH) -> list[Piece]:
    """Push all ids, the last with `end`, until the sequence has ended."""
    pieces = []
    for i, token_id in enumerate(ids):
        pieces.append(text.push(SampledToken(token_id, -0.5), end if i == len(ids) - 1 else None))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def shown_tokens(pieces: list[Piece]) -> str:
    return b"".join(TOKENS.bytes_of(placed.token.token_id) for piece in pieces for placed in piece.tokens).decode()


def test_the_end_token_is_not_shown() -> None:
    pieces = run(sequence(), [*ids_of("hello"), EOS], FinishReason.STOP)
    assert joined(pieces) == "hello"
    assert shown_tokens(pieces) == "hello"
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_the_end_token_is_shown_on_request() -> None:
    text = sequence(include_stop=True, skip=False)
    assert joined(run(text, [*ids_of("hello"), EOS], FinishReason.STOP)) == "hello<|eos|>"
    assert text.num_tokens == 2


def test_what_stopped_a_text_is_told_with_its_end() -> None:
    [mark] = ids_of("o")
    assert run(sequence("never", "ll"), ids_of("hello"))[-1].stop_reason == "ll"
    assert run(sequence("ll", include_stop=True), ids_of("hello"))[-1].stop_reason == "ll"
    assert run(sequence(stop_ids=(mark,)), [*ids_of("hell"), mark], FinishReason.STOP)[-1].stop_reason == mark
    assert run(sequence(stop_ids=(mark,)), [*ids_of("hell"), EOS], FinishReason.STOP)[-1].stop_reason is None
    assert run(sequence("xyz"), ids_of("hello"))[-1].stop_reason is None


def test_a_held_back_prefix_is_released_at_the_end() -> None:
    pieces = run(sequence("xyz"), ids_of("axy"))
    assert [piece.text for piece in pieces] == ["a", "", "xy"]


def test_a_held_back_prefix_is_released_when_it_leads_nowhere() -> None:
    pieces = run(sequence("xyz"), ids_of("axyab"))
    assert [piece.text for piece in pieces] == ["a", "", "", "xya", "b"]


def test_a_stop_string_inside_one_token() -> None:
    pieces = run(sequence("ll"), ids_of("hello"))
    assert joined(pieces) == "he"
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_the_stop_string_on_request() -> None:
    assert joined(run(sequence("yz", include_stop=True), ids_of("xyzab"))) == "xyz"


def test_a_stop_string_with_the_last_allowed_token_is_a_stop() -> None:
    [*_, last] = run(sequence("yz"), ids_of("xyz"))
    assert last.finish_reason is FinishReason.STOP


def test_stop_strings_wait_for_min_tokens() -> None:
    text = sequence("x", min_tokens=3)
    assert joined(run(text, ids_of("axaxbx"))) == "axa"
    assert text.num_tokens == 4


def test_an_unfinished_character_at_the_end() -> None:
    pieces = run(sequence(), ids_of("a😀")[:-1])
    assert joined(pieces) == "a\ufffd"
    assert sum(len(piece.tokens) for piece in pieces) == 4


def test_the_tokens_of_one_character_come_together() -> None:
    pieces = run(sequence(), ids_of("é!"))
    assert [len(piece.tokens) for piece in pieces] == [0, 2, 1]
    assert [placed.offset for piece in pieces for placed in piece.tokens] == [0, 0, 1]


texts = st.text("abé😀 ", min_size=1, max_size=20)
stop_lists = st.lists(st.text("abé😀 ", min_size=1, max_size=4), max_size=4)


@given(texts, stop_lists, st.booleans())
def test_the_output_ends_before_the_first_stop_string(text: str, stops: list[str], include: bool) -> None:
    ids = ids_of(text)
    pieces = run(sequence(*stops, include_stop=include), ids)
    ends = [
        (end, min(text[:end].rfind(stop) for stop in stops if text[:end].endswith(stop)))
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    expected = text if not ends else text[: ends[0][0 if include else 1]]
    assert joined(pieces) == expected
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


@given(texts, stop_lists)
def test_what_was_sent_of_text_and_tokens_always_matches(text: str, stops: list[str]) -> None:
    """At every moment the tokens sent begin in the text sent, in order, and none that has begun is missing."""
    pieces = run(sequence(*stops), ids_of(text))
    sent_text, offsets = "", []
    for piece in pieces:
        sent_text += piece.text
        offsets += [placed.offset for placed in piece.tokens]
        assert offsets == sorted(offsets)
        assert all(offset < max(len(sent_text), 1) for offset in offsets)
    tokens = [placed.token.token_id for piece in pieces for placed in piece.tokens]
    assert tokens == ids_of(text)[: len(tokens)]
    assert b"".join(map(TOKENS.bytes_of, tokens)).decode("utf-8", "ignore").startswith(sent_text)


@given(texts.filter(lambda text: "\0" not in text))
def test_without_stop_strings_the_pieces_are_those_beside_one_that_never_begins(text: str) -> None:
    """The way of a sequence in which nothing can be cut off, and the general one."""
    ids = ids_of(text)
    for finish in (FinishReason.LENGTH, FinishReason.STOP):
        assert run(sequence(), ids, finish) == run(sequence("\0"), ids, finish)
