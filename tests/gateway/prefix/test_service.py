"""PrefixService: spaces shared and kept apart, chains that equal a plain computation, faults that stay small."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from gateway.prefix import PrefixService, PromptSource, Space, vocabulary
from gateway.prefix.keys import token_keys
from policies.types import ReplicaId
from tests.support.tiny_tokenizer import CHATML, tiny_bundle

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
COUNTS = CHATML + "{{ messages | length }}"  # only jinja2 can render it
WORDS = ["the", "quick", "brown", "fox", "over", "a", "dog", "<s>", "<think>", "Größe", "日本語", "🙂", "cache", "0123"]


@pytest.fixture
async def service() -> AsyncIterator[PrefixService]:
    service = PrefixService()
    yield service
    service.check_invariants()
    service.close()


def chat(*contents: str, **more: Any) -> PromptSource:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return PromptSource(
        messages=[{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)], **more
    )


def said(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def plain_keys(space: Space, ids: list[int], adapter: str = "", salt: str = "") -> tuple[int, ...]:
    return tuple(token_keys(space.root(adapter, salt), ids, space.block_tokens))


async def test_a_conversation_gets_the_keys_of_its_whole_tokenization(service: PrefixService) -> None:
    """Turn by turn, so that most pieces come from the cache: the ids must still be the whole's."""
    bundle, rng = tiny_bundle(), random.Random(7)
    renderer = PromptRenderer(bundle)
    space = await service.register(A, "m", bundle, 4)
    contents = [said(rng, 200)]
    for _ in range(8):
        contents.append(said(rng, 40))
        source = chat(*contents)
        chain = (await service.chains(source, [space.key_space]))[space.key_space]
        assert source.messages is not None
        ids = renderer.chat_ids(source.messages)
        assert chain.num_tokens == len(ids)
        assert chain.keys == plain_keys(space, ids)
    stats = service.stats()
    assert stats.num_piece_hits > stats.num_piece_misses
    assert (stats.num_prompts, stats.num_failed) == (8, 0)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
async def test_plain_prompts_get_their_special_tokens(service: PrefixService, kind: str) -> None:
    bundle = tiny_bundle(kind=kind)
    renderer = PromptRenderer(bundle)
    space = await service.register(A, "m", bundle, 2)
    for text in ("The quick brown fox", "", "two<|im_end|>parts " * 100):
        for add in (None, True, False):
            source = PromptSource(prompt=text, add_special_tokens=add)
            chain = (await service.chains(source, [space.key_space]))[space.key_space]
            assert chain.keys == plain_keys(space, renderer.encode(text, add is not False))


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
async def test_chats_get_special_tokens_as_the_worker_gives_them(service: PrefixService, kind: str) -> None:
    bundle = tiny_bundle(kind=kind)
    renderer = PromptRenderer(bundle)
    space = await service.register(A, "m", bundle, 2)
    for add in (None, True, False, True):
        source = chat("The quick brown fox", add_special_tokens=add)
        chain = (await service.chains(source, [space.key_space]))[space.key_space]
        assert source.messages is not None
        assert chain.keys == plain_keys(space, renderer.chat_ids(source.messages, add_special_tokens=bool(add)))


async def test_ids_are_taken_as_they_are(service: PrefixService) -> None:
    space = await service.register(A, "m", tiny_bundle(), 2)
    for prompt in ([5, 6, 7, 8, 9], [[5, 6, 7, 8, 9], [1]]):
        chain = (await service.chains(PromptSource(prompt=prompt), [space.key_space]))[space.key_space]
        assert (chain.keys, chain.num_tokens) == (plain_keys(space, [5, 6, 7, 8, 9]), 5)
    several = PromptSource(prompt=["The quick", "brown fox"])
    first = PromptSource(prompt="The quick")
    assert await service.chains(several, [space.key_space]) == await service.chains(first, [space.key_space])


async def test_salt_and_adapter_keep_prompts_apart(service: PrefixService) -> None:
    space = await service.register(A, "m", tiny_bundle(), 4)
    text = await service.register(B, "m", None)
    seen = set()
    for adapter in ("", "x"):
        for salt in ("", "x"):
            source = chat("The quick brown fox. " * 20, adapter=adapter, salt=salt)
            for chain in (await service.chains(source, [space.key_space, text.key_space])).values():
                assert chain.keys
                seen.add(chain.keys[0])
    assert len(seen) == 8


async def test_replicas_share_a_space_when_all_that_matters_is_equal(service: PrefixService) -> None:
    bundle = tiny_bundle()
    first = await service.register(A, "m", bundle, 4)
    assert await service.register(B, "m", bundle, 4) == first
    others = [
        await service.register(C, "m", bundle, 8),
        await service.register(C, "other", bundle, 4),
        await service.register(C, "m", tiny_bundle(CHATML + " "), 4),
        await service.register(C, "m", tiny_bundle(kind="metaspace"), 4),
        await service.register(C, "m", None),
        await service.register(C, "other", None),
    ]
    assert len({first.key_space, *(space.key_space for space in others)}) == 7
    assert service.space_of(C) == others[-1]


async def test_what_no_replica_uses_is_forgotten(service: PrefixService) -> None:
    first = await service.register(A, "m", tiny_bundle(), 4)
    await service.register(B, "m", tiny_bundle(), 4)
    service.unregister(A)
    assert await service.chains(chat("x"), [first.key_space])
    service.unregister(B)
    service.unregister(B)
    assert await service.chains(chat("x"), [first.key_space]) == {}
    assert service.stats().num_cached_bytes == 0
    assert service.space_of(B) is None


async def test_replicas_that_register_together_build_one_tokenizer(service: PrefixService) -> None:
    spaces = await asyncio.gather(*(service.register(ReplicaId(str(i)), "m", tiny_bundle(), 4) for i in range(5)))
    assert len(set(spaces)) == 1
    assert await service.vocabulary_of(ReplicaId("0")) is await service.vocabulary_of(ReplicaId("4"))


async def test_a_prompt_that_can_not_be_rendered_has_no_token_chain_and_is_counted(service: PrefixService) -> None:
    tokens = await service.register(A, "m", tiny_bundle("{{ raise_exception('no') }}"), 4)
    text = await service.register(B, "m", None)
    chains = await service.chains(chat("hello " * 100), [tokens.key_space, text.key_space])
    assert set(chains) == {text.key_space}
    assert service.stats().num_failed == 1


@pytest.mark.parametrize(
    "source",
    [
        PromptSource(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        PromptSource(messages=[{"role": "user", "content": 7}]),
        PromptSource(messages=[{"role": "user", "content": [None, 7, {"text": 7}]}]),
        PromptSource(messages=[None]),  # type: ignore[list-item]
        PromptSource(messages=[{"role": "user", "content": "x"}], chat_template_kwargs={"messages": []}),
        PromptSource(messages=[{"role": "user", "content": "x"}], tools=["t"]),  # type: ignore[list-item]
        PromptSource(prompt=[-1]),
        PromptSource(prompt=[2**40]),
        PromptSource(prompt=[1, "a"]),  # type: ignore[list-item]
        PromptSource(prompt=[[1, None]]),  # type: ignore[list-item]
        PromptSource(prompt="lone \ud800 surrogate"),
    ],
)
async def test_no_prompt_fails_a_request(
    service: PrefixService, source: PromptSource, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = await service.register(A, "m", tiny_bundle(), 4)
    text = await service.register(B, "m", None)
    chains = await service.chains(source, [tokens.key_space, text.key_space])
    assert tokens.key_space not in chains
    assert service.stats().num_failed == 1
    assert not caplog.records  # the client's mistake, which its replica answers: no line of ours for each


async def test_a_request_with_its_own_template_has_no_token_chain(service: PrefixService) -> None:
    tokens = await service.register(A, "m", tiny_bundle(), 4)
    assert await service.chains(chat("x", own_template=True), [tokens.key_space]) == {}


async def test_long_prompts_leave_the_event_loop_free(service: PrefixService) -> None:
    tokens = await service.register(A, "m", tiny_bundle(), 16)
    long = chat(said(random.Random(1), 60_000))
    task = asyncio.create_task(service.chains(long, [tokens.key_space]))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert (await task)[tokens.key_space].num_tokens > 60_000
    assert num_turns > 10
    assert service.stats().num_threaded > 0


async def test_a_known_prompt_needs_no_thread(service: PrefixService) -> None:
    tokens = await service.register(A, "m", tiny_bundle(), 16)
    source = chat(said(random.Random(1), 500), "and now?")
    first = await service.chains(source, [tokens.key_space])
    num_threaded = service.stats().num_threaded
    assert num_threaded == 1
    assert await service.chains(source, [tokens.key_space]) == first
    assert service.stats().num_threaded == num_threaded


async def test_a_slow_template_moves_to_a_thread(service: PrefixService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "SLOW_RENDER_S", 0.0)  # any template is slow then, on any machine
    tokens = await service.register(A, "m", tiny_bundle(COUNTS), 4)
    for _ in range(2):
        assert await service.chains(chat("x"), [tokens.key_space])
    assert service.stats().num_threaded == 1


async def test_a_machine_that_is_busy_does_not_make_a_template_slow(
    service: PrefixService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await service.register(A, "m", tiny_bundle(COUNTS), 4)
    [built] = service._vocabularies.values()
    renderer, away_s = built.result().renderer, 2 * vocabulary.SLOW_RENDER_S
    render = renderer.render_chat

    def interrupted(*arguments: Any, **options: Any) -> str:
        time.sleep(away_s)  # others have the processor meanwhile
        return render(*arguments, **options)

    monkeypatch.setattr(renderer, "render_chat", interrupted)
    for _ in range(2):
        assert await service.chains(chat("x"), [tokens.key_space])
    assert service.stats().num_threaded == 0


async def test_a_cancelled_caller_leaves_the_service_whole(service: PrefixService) -> None:
    tokens = await service.register(A, "m", tiny_bundle(), 16)
    source = chat(said(random.Random(2), 30_000))
    task = asyncio.create_task(service.chains(source, [tokens.key_space]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await service.chains(source, [tokens.key_space]))[tokens.key_space].keys


async def test_a_tokenizer_that_can_not_be_read_is_an_error_at_registration(service: PrefixService) -> None:
    broken = TokenizerBundle(
        fingerprint="x", tokenizer_json="{}", chat_template=None, special_tokens={}, max_model_len=1
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="tokenizer can't be read"):
            await service.register(A, "m", broken, 4)
    assert (await service.register(A, "m", None)).tokenizer == ""
