"""From a replica's registration to exact knowledge of its cache: tokenizer, parity, KV events, and a new life."""

from __future__ import annotations

import pytest

from engine_worker.core import events as core
from engine_worker.core.types import BlockHash
from engine_worker.serving.kv_publisher import KVPublisher
from gateway.prefix.source import PromptSource
from policies.events import BlocksCleared, BlocksStored
from tests.gateway.harness import until
from tests.gateway.test_dialects import Fleet, state, worker_with_tokenizer

URL = "http://127.0.0.1:1"


@pytest.fixture
def publisher():
    publisher = KVPublisher("tcp://127.0.0.1:0")
    yield publisher
    publisher.close()


def publishing(publisher: KVPublisher, incarnation: str = "i1"):
    answers = worker_with_tokenizer()
    answers["/internal/state"] = state(
        incarnation=incarnation,
        kv_events_endpoint=publisher.endpoint,
        kv_events_replay_endpoint=publisher.replay_endpoint,
    )
    return answers


def stored_keys(fleet: Fleet) -> set[int]:
    return {key for event in fleet.events if isinstance(event, BlocksStored) for key in event.keys}


async def test_a_workers_blocks_get_the_keys_of_the_prompts_that_they_hold(publisher):
    async with Fleet(publishing(publisher), url=URL) as fleet:
        await until(lambda: fleet.replica.kv_feed == "exact")
        source = PromptSource(prompt="The quick brown fox jumps over the lazy dog, and the dog does not mind at all.")
        chains = await fleet.prefix.chains(source, [fleet.replica.key_space])
        keys = chains[fleet.replica.key_space].keys
        assert keys
        packed = await fleet.prefix.packed_ids(fleet.replica.replica_id, source)
        ids = memoryview(packed).cast("I").tolist()[: 16 * len(keys)]
        hashes = tuple(BlockHash(bytes([n]) * 32) for n in range(len(keys)))
        publisher.publish([core.BlocksStored(hashes, None, tuple(ids), 16, "")])
        await until(lambda: stored_keys(fleet) == set(keys))


async def test_a_restart_ends_the_old_feed_and_starts_another(publisher):
    async with Fleet(publishing(publisher), url=URL) as fleet:
        await until(lambda: fleet.replica.kv_feed == "exact")
        reborn = KVPublisher("tcp://127.0.0.1:0")
        try:
            fleet.answers.update(publishing(reborn, incarnation="i2"))
            await until(lambda: fleet.replica.incarnation == "i2" and fleet.replica.kv_feed == "exact")
            publisher.publish([core.BlocksStored((BlockHash(b"o" * 32),), None, tuple(range(16)), 16, "")])
            reborn.publish([core.BlocksStored((BlockHash(b"n" * 32),), None, tuple(range(16, 32)), 16, "")])
            await until(lambda: stored_keys(fleet))
            assert len(stored_keys(fleet)) == 1, "the old life's words are not heard"
            assert any(isinstance(event, BlocksCleared) for event in fleet.events)
        finally:
            reborn.close()


async def test_events_on_anothers_loopback_are_not_followed(publisher, caplog):
    async with Fleet(publishing(publisher)) as fleet:
        await until(lambda: fleet.replica.joined)
        assert fleet.replica.kv_feed == "none"
        assert "can't be reached" in caplog.text
