"""Prompts as text: equal blocks are equal text and equal tokens, whoever cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.contract.prompt import PromptRenderer
from loadtest.fleet.text import NUM_IDS, Wording, token_ids, tokenizer_bundle
from tests.loadtest.sim.traces import request, timed

W = Wording(512, 16)


@given(st.lists(st.integers(0, NUM_IDS - 1), min_size=2, max_size=20, unique=True), st.sampled_from([1, 16, 128]))
def test_blocks_are_equal_exactly_where_their_ids_are(ids: list[int], compress: int) -> None:
    wording = Wording(512, compress)
    texts = [wording.block(block_id) for block_id in ids]
    assert len(set(texts)) == len(ids)
    assert {len(text) for text in texts} == {wording.block_chars} == {512 // compress * 4}


def test_a_prompt_is_its_blocks_and_a_rest_of_its_own() -> None:
    one, other = request(7, 8, tail=100), request(7, 9, tail=100)
    texts = [W.prompt(one, "a"), W.prompt(one, "b"), W.prompt(other, "c")]
    cuts = [W.cut(text) for text in texts]
    assert [num_words for num_words, _ in cuts] == [2 * 32 + 7] * 3
    assert cuts[0][1] == cuts[1][1] == [W.block(7), W.block(8)]
    assert cuts[2][1] == [W.block(7), W.block(9)]
    assert len(set(texts)) == 3, "the rest belongs to the request"


@pytest.mark.parametrize("tail", [0, 1, 15, 16, 511])
def test_the_rest_never_makes_a_block(tail: int) -> None:
    traced = request(1, 2, tail=tail)
    num_words, blocks = W.cut(W.prompt(traced, "x"))
    assert len(blocks) == 2
    assert num_words == W.num_words(traced)
    [[served]] = W.as_served(timed(traced)).sessions
    assert served.num_prompt_tokens == num_words * 16
    assert served.num_prompt_tokens // 512 == 2


def test_the_tokenizer_reads_a_chat_as_the_fake_does() -> None:
    renderer = PromptRenderer(tokenizer_bundle())
    text = W.prompt(request(3, 4, tail=50), "x")
    ids = renderer.chat_ids([{"role": "user", "content": text}])
    assert tuple(ids) == token_ids(text)
    assert len(ids) == W.cut(text)[0]


@pytest.mark.parametrize("compress", [0, 3, 512, 256])
def test_what_does_not_divide_a_block_is_refused(compress: int) -> None:
    with pytest.raises(ValueError, match="must divide"):
        Wording(512, compress)


def test_an_id_that_three_words_cannot_spell_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be spelled"):
        W.block(NUM_IDS)
