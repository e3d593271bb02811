"""The parity self-test against replicas that agree, that differ in one thing, and that do not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from engine_worker.contract.prompt import PromptError, PromptRenderer
from engine_worker.contract.state import TokenizerBundle
from gateway.prefix import PrefixService
from gateway.prefix.parity import Parity, check_parity
from policies.types import ReplicaId
from tests.support.tiny_tokenizer import CHATML, tiny_bundle

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


class Replica:
    """Answers /tokenize as a worker with `bundle` would."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.renderer = PromptRenderer(bundle)
        self.bodies: list[dict[str, Any]] = []

    async def tokenize(self, body: dict[str, Any]) -> Sequence[int] | None:
        self.bodies.append(body)
        try:
            if "prompt" in body:
                return self.renderer.encode(body["prompt"], body["add_special_tokens"])
            return self.renderer.chat_ids(body["messages"], body.get("tools"), body["add_generation_prompt"])
        except PromptError:
            return None


@pytest.fixture
async def service() -> AsyncIterator[PrefixService]:
    service = PrefixService()
    yield service
    service.close()


async def parity(service: PrefixService, ours: TokenizerBundle, theirs: TokenizerBundle) -> Parity:
    await service.register(ReplicaId("r"), "m", ours, 16)
    return await check_parity(service, ReplicaId("r"), "m", Replica(theirs).tokenize)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
async def test_the_same_tokenizer_agrees(service: PrefixService, kind: str) -> None:
    bundle = tiny_bundle(TOOLS, kind=kind)
    assert await parity(service, bundle, bundle) == Parity()


async def test_a_template_that_both_refuse_agrees(service: PrefixService) -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    bundle = tiny_bundle(no_system)
    assert await parity(service, bundle, bundle) == Parity()
    found = await parity(service, tiny_bundle(), bundle)
    assert found.mismatch is not None
    assert "a conversation with a system message" in found.mismatch
    assert "it refuses" in found.mismatch
    found = await parity(service, bundle, tiny_bundle())
    assert found.mismatch is not None
    assert "we can't render" in found.mismatch


async def test_another_template_is_named(service: PrefixService) -> None:
    found = await parity(service, tiny_bundle(), tiny_bundle(CHATML.replace("assistant\n", "assistant")))
    assert found.mismatch is not None
    assert "a single user message" in found.mismatch
    assert "equal up to number" in found.mismatch


async def test_a_trimmed_turn_is_named(service: PrefixService) -> None:
    trimmed = CHATML.replace("message['content']", "message['content'] | trim")
    assert (await parity(service, tiny_bundle(), tiny_bundle(trimmed))).mismatch is not None


async def test_another_tokenizer_is_named_without_any_template(service: PrefixService) -> None:
    ours, theirs = tiny_bundle(None), tiny_bundle(None, kind="metaspace")
    found = await parity(service, ours, theirs)
    assert found.mismatch is not None
    assert "a plain prompt" in found.mismatch
    assert await parity(service, ours, ours) == Parity()


async def test_tools_that_are_rewritten_cost_only_tools(service: PrefixService) -> None:
    sorts = TOOLS.replace("tojson", "tojson(sort_keys=true)")
    found = await parity(service, tiny_bundle(TOOLS), tiny_bundle(sorts))
    assert found.mismatch is None
    assert found.tools_mismatch is not None
    assert "tools" in found.tools_mismatch


async def test_what_the_call_raises_passes(service: PrefixService) -> None:
    async def gone(body: dict[str, Any]) -> Sequence[int] | None:
        raise ConnectionError("gone")

    await service.register(ReplicaId("r"), "m", tiny_bundle(), 16)
    with pytest.raises(ConnectionError):
        await check_parity(service, ReplicaId("r"), "m", gone)
