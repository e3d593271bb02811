"""Masks of grammars: every output they allow is a word of the grammar, whatever happens to the request meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine_worker.core.types import SampledToken, Segment
from engine_worker.model.sampler import Sampler
from engine_worker.model.token_masks import TokenMasks
from tests.engine_worker.model.sampling import segment
from tests.engine_worker.serving.fake_engine import make_tokenizer

pytestmark = pytest.mark.engine

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.get_vocab_size() + 5  # logits are wider than the vocabulary
EOS = TOKENIZER.token_to_id("<|eos|>")


@pytest.fixture(scope="module")
def masks() -> Iterator[TokenMasks]:
    made = TokenMasks(TOKENIZER.to_str(), VOCAB, [EOS])
    yield made
    made.close()


def sampler_of(masks: TokenMasks, eos: tuple[int, ...] = (EOS,)) -> Sampler:
    return Sampler(VOCAB, eos, "cpu", masks)


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def step(sampler: Sampler, segments: list[Segment], logits: torch.Tensor) -> dict[str, SampledToken]:
    """A step as the runner makes it: tokens are appended, as a commit would."""
    sampler.prepare(segments)
    tokens, failed = sampler.sample(logits, segments)
    assert failed == {}
    for s in segments:
        s.request.output_ids.append(tokens[s.request.request_id].token_id)
    return tokens


def generate(sampler: Sampler, mine: Segment, seed: int, limit: int = 300) -> tuple[str, str]:
    """(text, how it ended) under random logits."""
    generator = torch.Generator().manual_seed(seed)
    request = mine.request
    for _ in range(limit):
        token_id = step(sampler, [mine], torch.randn(1, VOCAB, generator=generator))[request.request_id].token_id
        if token_id == EOS:
            return text_of(request.output_ids[:-1]), "eos"
        if request.request_id in sampler.completed:
            return text_of(request.output_ids), "complete"
    return text_of(request.output_ids), "length"


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}, {"temperature": 2.0, "top_p": 0.5, "top_k": 9}])
def test_every_output_is_a_word_of_the_grammar(masks: TokenMasks, seed: int, params: dict[str, Any]) -> None:
    pattern = r"(red|green)-[0-9]{2,4}(, é😀[a-c]*)?"
    text, end = generate(sampler_of(masks), segment(grammar=regex(pattern), **params), seed)
    assert end in ("eos", "complete")
    assert re.fullmatch(pattern, text), text


def test_the_last_token_of_a_finite_grammar_completes_it(masks: TokenMasks) -> None:
    assert generate(sampler_of(masks), segment(grammar=regex("hello"), temperature=0.0), 0) == ("hello", "complete")


def test_neighbours_do_not_matter(masks: TokenMasks) -> None:
    """The same seeded request alone, and among others with and without grammars."""
    grammar = regex("[a-z]{200}")

    def mine() -> Segment:
        return segment(grammar=grammar, seed=11)

    alone = mine()
    sampler = sampler_of(masks)
    for i in range(20):
        step(sampler, [alone], torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(i)))
    other = [segment(grammar=regex("[0-9]{200}"), seed=1), segment(temperature=0.0), segment(seed=2)]
    crowded = mine()
    for i in range(20):
        row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(i))
        step(sampler, [other[0], crowded, *other[1:]], torch.cat([torch.randn(1, VOCAB), row, torch.randn(2, VOCAB)]))
    assert crowded.request.output_ids == alone.request.output_ids
    assert re.fullmatch("[0-9]{20}", text_of(other[0].request.output_ids))


@pytest.mark.parametrize("num_back", [1, 3, 7])
def test_output_taken_back_takes_the_matcher_back(masks: TokenMasks, num_back: int) -> None:
    """Drafts that were refused, and another token in their place."""
    sampler = sampler_of(masks)
    mine = segment(grammar=regex("(ab|cd)*x{3}[0-9]{3}"), temperature=0.0)
    ids = TOKENIZER.encode("abcdabx").ids
    for token_id in ids:
        logits = torch.zeros(1, VOCAB)
        logits[0, token_id] = 5
        assert step(sampler, [mine], logits)[mine.request.request_id].token_id == token_id
    del mine.request.output_ids[len(ids) - num_back :]
    text, end = generate(sampler, mine, 5)
    assert end == "complete"
    assert re.fullmatch("(ab|cd)*x{3}[0-9]{3}", text)


def test_a_matcher_finds_a_request_that_has_output_already(masks: TokenMasks) -> None:
    mine = segment(grammar=regex("hello [0-9]"), temperature=0.0, output_ids=TOKENIZER.encode("hello ").ids)
    assert generate(sampler_of(masks), mine, 1)[0][:-1] == "hello "


def test_min_tokens_holds_the_end_back_only_where_there_is_more_to_say(masks: TokenMasks) -> None:
    for seed in range(5):
        open_end, _ = generate(sampler_of(masks), segment(grammar=regex("[0-9]+"), min_tokens=30), seed, 60)
        assert len(open_end) >= 30
        assert generate(sampler_of(masks), segment(grammar=regex("[0-9]{2}"), min_tokens=30), seed)[1] == "complete"


def test_ignore_eos_goes_on_while_the_grammar_does(masks: TokenMasks) -> None:
    text, end = generate(sampler_of(masks), segment(grammar=regex("[0-9]+"), ignore_eos=True), 3, 50)
    assert (len(text), end) == (50, "length")
    assert generate(sampler_of(masks), segment(grammar=regex("[0-9]{9}"), ignore_eos=True), 3)[1] == "complete"


def test_a_model_without_an_end_token_stops_with_its_grammar() -> None:
    endless = TokenMasks(TOKENIZER.to_str(), VOCAB, [])
    try:
        text, end = generate(Sampler(VOCAB, (), "cpu", endless), segment(grammar=regex("[a-f]{4}")), 3)
        assert (len(text), end) == (4, "complete")
    finally:
        endless.close()


def test_allowed_ids_narrow_a_grammar_but_not_its_end(masks: TokenMasks) -> None:
    digits = tuple(TOKENIZER.encode("135").ids)
    text, end = generate(sampler_of(masks), segment(grammar=regex("[0-9]{1,9}"), allowed_token_ids=digits), 2)
    assert re.fullmatch("[135]{1,9}", text)
    assert end in ("eos", "complete")


def test_a_row_without_a_way_out_fails_alone(masks: TokenMasks) -> None:
    sampler = sampler_of(masks)
    stuck = segment(grammar=regex("[0-9]{3}"), allowed_token_ids=tuple(TOKENIZER.encode("a").ids))
    fine = segment(grammar=regex("[0-9]{3}"))
    tokens, failed = sampler.sample(torch.zeros(2, VOCAB), [stuck, fine])
    assert fine.request.request_id in tokens
    assert "leave no token" in failed[stuck.request.request_id]


def test_a_grammar_that_can_not_be_compiled_fails_alone(masks: TokenMasks) -> None:
    bad, fine = segment(grammar='{"grammars": [{"lark_grammar": "start: nowhere"}]}'), segment(temperature=0.0)
    tokens, failed = sampler_of(masks).sample(torch.zeros(2, VOCAB), [bad, fine])
    assert fine.request.request_id in tokens
    assert "can't be followed" in failed[bad.request.request_id]


def test_release_forgets(masks: TokenMasks) -> None:
    sampler, mine = sampler_of(masks), segment(grammar=regex("[0-9]{30}"))
    step(sampler, [mine], torch.zeros(1, VOCAB))
    before = masks.num_states
    sampler.release(mine.request.request_id)
    sampler.release(mine.request.request_id)
    assert masks.num_states == before - 1


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "number", "minimum": 0, "maximum": 2},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"enum": ["x", 1, None, "é😀"]},
        {"const": {"a": [1]}},
    ]
)


def _object(properties: dict[str, Any], data: int) -> dict[str, Any]:
    required = [name for i, name in enumerate(properties) if data >> i & 1]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(_object, st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.integers(0, 15))
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2))
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SCHEMAS, st.integers(0, 2**31))
def test_random_schemas_hold(masks: TokenMasks, schema: dict[str, Any], seed: int) -> None:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    sampler, mine = sampler_of(masks), segment(grammar=grammar, seed=seed)
    text, end = generate(sampler, mine, seed, 400)
    sampler.release(mine.request.request_id)
    assert end in ("eos", "complete", "length")
    if end != "length":
        jsonschema.validate(json.loads(text), schema)
