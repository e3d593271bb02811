"""Chats with a known beginning must get the keys of the whole, whatever came before and was forgotten."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine_worker.contract.prompt import PromptRenderer
from gateway.prefix import PrefixService, PromptSource
from gateway.prefix.keys import token_keys
from gateway.prefix.known import Place, Places
from gateway.prefix.tokenize import joints
from policies.types import BlockKey, ReplicaId
from tests.gateway.prefix.test_words import renderer as words_renderer
from tests.support.chat_templates import READ
from tests.support.tiny_tokenizer import CHATML, tiny_bundle, tiny_tokenizer

REPLICA = ReplicaId("r")
TEXTS = [
    "", " ", "the quick brown fox", "<|im_end|>", "<|im_end|>\n<|end|>", "<|im_", "<", "<s", "\n", "  <mask> x", "fox",
    "<|im_start|>", "<think>", "<tool>", "Größe 日本語 🙂", "word " * 60, "12345 a'll\n\n", "</s>", "end ", "|end|>",
]  # fmt: skip


@pytest.fixture
async def service() -> AsyncIterator[PrefixService]:
    service = PrefixService(cache_bytes=64_000)  # so little that much is forgotten
    yield service
    service.check_invariants()
    service.close()


def said(rng: random.Random) -> str:
    return "".join(rng.choice(TEXTS) for _ in range(rng.randint(0, 3)))


def next_chat(rng: random.Random, chats: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A turn more of an earlier chat, a part of one, or a new one; mostly in turns, since some templates insist."""
    old = rng.choice(chats) if chats and rng.random() < 0.9 else []
    messages = [*old[: rng.randint(0, len(old))]] if rng.random() < 0.3 else [*old]
    if not messages and rng.random() < 0.5:
        messages.append({"role": "system", "content": said(rng)})
    for _ in range(rng.randint(0 if messages else 1, 2)):
        after = messages[-1]["role"] if messages else ""
        role = "assistant" if after == "user" else "user"
        messages.append({"role": role if rng.random() < 0.97 else rng.choice(["tool", "system"]), "content": said(rng)})
    if rng.random() < 0.05:
        messages[-1] = {**messages[-1], "name": "Ann"}
    return messages


def bundle_of(template: str, kind: str) -> Any:
    if kind != "words":
        return tiny_bundle(template, kind=kind)
    plain = words_renderer("llama-3").bundle
    return type(plain)(
        fingerprint=plain.fingerprint, tokenizer_json=plain.tokenizer_json, chat_template=template,
        special_tokens=tiny_bundle().special_tokens, max_model_len=100,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "words"])
@pytest.mark.parametrize("name", [*READ, "bare"])
async def test_known_beginnings_give_the_keys_of_the_whole(service: PrefixService, name: str, kind: str) -> None:
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    bundle = bundle_of(READ.get(name, bare), kind)
    renderer, rng = PromptRenderer(bundle), random.Random(f"{name} {kind}")
    spaces = {
        4: await service.register(REPLICA, "m", bundle, 4),
        3: await service.register(ReplicaId("s"), "m", bundle, 3),
    }
    vocabulary = await service.vocabulary_of(REPLICA)
    assert vocabulary is not None
    assert vocabulary._chats is not None
    chats: list[list[dict[str, Any]]] = []
    for _ in range(120):
        messages, ask, salt = next_chat(rng, chats), rng.random() < 0.8, rng.choice(["", "", "x"])
        source = PromptSource(messages=messages, add_generation_prompt=ask, salt=salt)
        names = [space.key_space for space in spaces.values()]
        chains = service.chains_now(source, names)
        if chains is None:
            chains = await service.chains(source, names)
        try:
            ids = renderer.chat_ids(messages, None, ask)
        except Exception:
            assert chains == {}
            continue
        for block_size, space in spaces.items():
            chain = chains[space.key_space]
            assert chain.num_tokens == len(ids)
            assert list(chain.keys) == token_keys(space.root("", salt), ids, block_size)
        chats.append(messages)
        vocabulary._chats.places.check_invariants()
    assert len(chats) > 60
    # In these, no message begins with a special token, but by what it says.
    is_apart = name not in ("vicuna", "mistral", "bare") and (name, kind) != ("mistral with a system message", "words")
    assert vocabulary._chats.num_known > 20 or not is_apart


async def test_known_messages_are_known(service: PrefixService) -> None:
    space = await service.register(REPLICA, "m", tiny_bundle(), 4)
    vocabulary = await service.vocabulary_of(REPLICA)
    assert vocabulary is not None
    assert vocabulary._chats is not None
    first = [{"role": "system", "content": "the fox"}, {"role": "user", "content": "Hi"}]
    more = [*first, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "And?"}]
    seen, before = [], 0
    for messages in (first, first, more, more, [*more[:2], {"role": "user", "content": "Else?"}]):
        assert service.chains_now(PromptSource(messages=messages), [space.key_space])
        seen.append(vocabulary._chats.num_known - before)
        before = vocabulary._chats.num_known
    assert seen == [0, 2, 2, 4, 2]
    assert service.chains_now(PromptSource(messages=first, salt="x"), [space.key_space])
    assert vocabulary._chats.num_known == before, "another tenant's keys are others"


async def test_a_long_chat_is_learned_little_by_little(service: PrefixService) -> None:
    bundle = tiny_bundle()
    space = await service.register(REPLICA, "m", bundle, 4)
    vocabulary = await service.vocabulary_of(REPLICA)
    assert vocabulary is not None
    assert vocabulary._chats is not None
    vocabulary._chats.max_new = 3
    source = PromptSource(messages=[{"role": "user", "content": f"the {i}"} for i in range(8)])
    chains = [vocabulary.chain_now(source, space.root("", ""), 4) for _ in range(5)]
    assert chains[:3] == [None, None, None]
    ids = PromptRenderer(bundle).chat_ids(source.messages or [])
    for chain in chains[3:]:
        assert chain is not None
        assert list(chain.keys) == token_keys(space.root("", ""), ids, 4)


async def test_long_new_texts_are_left_to_threads(service: PrefixService) -> None:
    space = await service.register(REPLICA, "m", tiny_bundle(), 4)
    vocabulary = await service.vocabulary_of(REPLICA)
    assert vocabulary is not None
    chat = [{"role": "user", "content": "日本 " * 100}] * 2 + [{"role": "user", "content": "語日 " * 300}]
    source = PromptSource(messages=chat)
    for _ in range(2):
        assert vocabulary.chain_now(source, space.root("", ""), 4) is None
    chain = (await service.chains(source, [space.key_space]))[space.key_space]
    assert vocabulary.chain_now(source, space.root("", ""), 4) == chain


async def test_a_longer_token_that_two_messages_make_is_no_place_to_cut(service: PrefixService) -> None:
    """The second begins with a token before which one can cut, the third makes it one that takes the blanks before."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("<s><x>", lstrip=True, special=True)])
    bare = tiny_bundle("{% for message in messages %}{{ message.content }}{% endfor %}")
    bundle = msgspec.structs.replace(bare, tokenizer_json=tokenizer.to_str())
    space = await service.register(REPLICA, "m", bundle, 1)
    renderer = PromptRenderer(bundle)
    said = ["the  ", "<s>", "<x>", "</s>", "", "<s>", " dog"]
    for _ in range(2):
        for end in range(1, len(said) + 1):
            messages = [{"role": "user", "content": text} for text in said[:end]]
            chains = await service.chains(PromptSource(messages=messages), [space.key_space])
            ids = renderer.chat_ids(messages)
            assert list(chains[space.key_space].keys) == token_keys(space.root("", ""), ids, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_special_tokens": True},
    ],
)
async def test_other_ways_to_ask_are_not_mistaken_for_the_plain_one(service: PrefixService, more: Any) -> None:
    template = CHATML + "{{ tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    space = await service.register(REPLICA, "m", tiny_bundle(template), 2)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    plain = service.chains_now(PromptSource(messages=messages), [space.key_space])
    other = service.chains_now(PromptSource(messages=messages, **more), [space.key_space])
    assert plain
    assert other
    assert other != plain


async def test_messages_of_other_shapes_are_told_apart(service: PrefixService) -> None:
    """Equal to the eye, not to the template."""
    template = CHATML.replace("message['content']", "message['content'] ~ message.name ~ message.n")
    space = await service.register(REPLICA, "m", tiny_bundle(template), 2)
    chats: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": "x", "name": "y"},
        {"role": "user", "content": "x", "n": 1},
        {"role": "user", "content": "x", "n": "2"},
        {"role": "userx", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "z"}]},
    ]
    renderer = PromptRenderer(tiny_bundle(template))
    for _ in range(2):
        for message in chats:
            chains = await service.chains(PromptSource(messages=[message]), [space.key_space])
            ids = renderer.chat_ids([message])
            assert list(chains[space.key_space].keys) == token_keys(space.root("", ""), ids, 2)


async def test_what_can_not_have_a_digest_is_cut_in_the_general_way(service: PrefixService) -> None:
    space = await service.register(REPLICA, "m", tiny_bundle(), 4)
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    odd: list[Any] = [[], [None], [{"role": "user", "content": "\ud800"}],
                      *([{"role": "user", "content": "x", "y": value}] for value in (2**70, deep))]  # fmt: skip
    for messages in odd:
        await service.chains(PromptSource(messages=messages), [space.key_space])
    vocabulary = await service.vocabulary_of(REPLICA)
    assert vocabulary is not None
    assert vocabulary._chats is not None
    vocabulary._chats.max_messages = 2
    chat = [{"role": "user", "content": "x"}] * 3
    root = space.root("", "")
    assert vocabulary.chain_now(PromptSource(messages=chat), root, 4) is None
    assert vocabulary.chain_now(PromptSource(messages=chat[1:]), root, 4) is not None
    vocabulary._chats.max_chat_bytes = 1
    assert vocabulary.chain_now(PromptSource(messages=chat[1:]), root, 4) is None


def test_joints_are_tokens_that_nothing_reaches_into() -> None:
    assert joints(["<a>", "<b>"], ["<a>", "<b>", "<ab>"]) == {"<a>", "<b>"}
    assert joints(["<a>", "<b>"], ["<a>", "<b>", "x<"]) == set(), "a token that ends as they begin"
    assert joints(["<a>", "<b>"], ["<a>", "<b>", "x<a"]) == {"<b>"}
    assert joints(["<a>", "<b>"], ["<a>", "<b>", "x<a>y"]) == {"<b>"}, "one that has another inside"
    assert joints(["aa", "b"], ["aa", "b"]) == {"b"}, "one that overlaps itself"
    assert joints(["<a>", "<a>>"], ["<a>", "<a>>"]) == {"<a>", "<a>>"}, "a longer one of the same beginning"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 12), st.booleans()), max_size=80))
def test_places_never_hold_more_than_they_may(steps: list[tuple[str, int, bool]]) -> None:
    places, last = Places(max_bytes=4_000), dict[bytes, Place]()
    for name, num_keys, puts in steps:
        digest = name.encode()
        if puts:
            last[digest] = Place(0, [BlockKey(i) for i in range(num_keys)], b"")
            places.put(digest, last[digest])
        else:
            assert places.get(digest) in (None, last.get(digest))
        places.check_invariants()
        assert places.num_bytes <= 4_000


def test_used_places_are_kept() -> None:
    places = Places(max_bytes=4 * 2 * 300)
    for i in range(40):
        if places.get(b"kept") is None:
            assert i == 0
            places.put(b"kept", Place(0, [], b""))
        places.put(b"%d" % i, Place(0, [], b""))
    assert len(places) <= 8
    assert places.get(b"0") is None
    places.put(b"huge", Place(0, [BlockKey(0)] * 100, b""))
    assert places.get(b"huge") is None
