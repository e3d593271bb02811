"""Prompts kept for replay: what is kept, what is chosen, what is sent."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix.source import PromptSource
from gateway.replicas.gate import Gate
from gateway.replicas.hot_prompts import HotPrompt, HotPrompts, hottest, replay_body
from tests.policies.support import BLOCK, keys

MODELS = frozenset({"m"})


def prompt(path: str, model: str = "m", body: bytes = b"x" * 100, num_uses: int = 1) -> HotPrompt:
    source = PromptSource(prompt=path)
    return HotPrompt("/v1/completions", model, body, source, keys(path), len(path) * BLOCK, None, num_uses)


def paths(prompts: list[HotPrompt]) -> list[str]:
    return [str(each.source.prompt) for each in prompts]


def test_a_later_turn_replaces_the_earlier_one() -> None:
    store = HotPrompts(100_000)
    for path in ("ab", "xy", "abc", "abcd"):
        store.note(prompt(path))
    assert paths(store.of(MODELS)) == ["abcd", "xy"]
    assert store.of(MODELS)[0].num_uses == 3
    store.check_invariants()


def test_other_models_prompts_are_not_given() -> None:
    store = HotPrompts(100_000)
    store.note(prompt("ab", "other"))
    assert store.of(MODELS) == []


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = HotPrompts(0)
    store.note(prompt("ab"))
    store.note(prompt(""))
    assert len(store) == store.num_bytes == 0


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=40), st.integers(0, 3000))
def test_the_store_is_bounded_and_keeps_the_youngest(given_paths: list[str], max_bytes: int) -> None:
    store = HotPrompts(max_bytes)
    for path in given_paths:
        store.note(prompt(path))
        store.check_invariants()
    last = [path for path in given_paths if path and prompt(path).num_bytes <= max_bytes]
    if last and given_paths[-1] == last[-1]:
        assert paths(store.of(MODELS))[0] == last[-1]


def test_the_hottest_first_and_nothing_twice() -> None:
    shared = [prompt("SSSS" + tail) for tail in ("a", "b", "c")]
    lonely = prompt("qqqqq")
    busy = prompt("zz", num_uses=50)
    chosen = paths(hottest([lonely, *shared, busy], 10_000))
    assert chosen[0] == "zz"
    assert chosen[1].startswith("SSSS")
    assert chosen.index("qqqqq") < max(chosen.index(f"SSSS{tail}") for tail in "abc"), "what they share is warm by then"
    assert len(chosen) == 5


def test_no_more_new_tokens_than_allowed() -> None:
    many = [prompt(letter * 4) for letter in "abcdef"]
    assert len(hottest(many, 10 * BLOCK)) == 2
    assert hottest(many, 0) == []


def test_a_replay_has_the_same_prompt_and_one_token() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\\u00e9 1.0"}],"stream":true,"n":3,"tools":[{"a":1.0}]}'
    replayed = replay_body(body)
    assert b'"messages":[{"role":"user","content":"\\u00e9 1.0"}]' in replayed
    assert b'"tools":[{"a":1.0}]' in replayed
    fields = msgspec.json.decode(replayed)
    assert (fields["max_tokens"], "stream" in fields, "n" in fields) == (1, False, False)
    again = msgspec.json.decode(replay_body(b'{"model":"m","prompt":"a","max_completion_tokens":99}'))
    assert again == {"model": "m", "prompt": "a", "max_completion_tokens": 1}


def test_a_leaving_replica_keeps_ever_less() -> None:
    gate = Gate(0.0)
    gate.leave(100.0, 10.0)
    places = [number / 100 for number in range(100)]
    kept = [sum(gate.admits(100.0 + passed, 0, 0.0, place) for place in places) for passed in (0.0, 5.0, 9.0, 10.0)]
    assert kept[0] >= 99
    assert kept[3] == 0
    assert kept == sorted(kept, reverse=True)
    assert 45 <= kept[1] <= 55
    assert gate.admits(105.0, 0, 0.0, 0.7)
    assert not gate.admits(109.0, 0, 0.0, 0.7), "one that was moved stays moved"
    gate.stay()
    assert gate.is_plain(106.0)
    assert all(gate.admits(120.0, 0, 0.0, place) for place in places)
