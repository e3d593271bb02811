"""Engine hashes to block keys: the keys of a prompt's chain and of its events must be the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_worker.contract import kv_events as wire
from gateway.prefix.keys import pack_ids, token_chain
from gateway.prefix.service import Space
from gateway.prefix.translate import KvEventTranslator
from policies.events import BlocksCleared, BlocksRemoved, BlocksStored
from policies.types import BlockKey, KeySpace, ReplicaId

SPACE = Space(KeySpace("tokens:x:2:m"), "m", "fingerprint", 2)
REPLICA = ReplicaId("r")


def chain(ids: list[int], salt: str = "", adapter: str = "") -> tuple[BlockKey, ...]:
    return token_chain(SPACE.root(adapter, salt), pack_ids(ids), 2).keys


def stored(hashes: list[int], parent: int | None, ids: list[int], **more: object) -> wire.BlockStored:
    return wire.BlockStored(
        block_hashes=tuple(hashes),
        parent_block_hash=parent,
        token_ids=tuple(ids),
        block_size=more.pop("block_size", 2),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def removed(*hashes: int, **more: object) -> wire.BlockRemoved:
    return wire.BlockRemoved(block_hashes=hashes, **more)  # type: ignore[arg-type]


class Replica:
    """A translator with what it said so far: the keys that the router now believes in."""

    def __init__(self, max_blocks: int = 1000) -> None:
        self.translator = KvEventTranslator(REPLICA, SPACE, max_blocks=max_blocks)
        self.keys: set[BlockKey] = set()
        self.num_cleared = 0

    def hears(self, *events: wire.WireEvent) -> str | None:
        translation = self.translator.translate(wire.EventBatch(timestamp=0.0, events=events), at=5.0)
        for event in translation.events:
            match event:
                case BlocksStored(at=5.0, replica_id="r", keys=keys):
                    assert self.keys.isdisjoint(keys)
                    self.keys |= set(keys)
                case BlocksRemoved(at=5.0, replica_id="r", keys=keys):
                    assert self.keys >= set(keys)
                    self.keys -= set(keys)
                case BlocksCleared():
                    self.keys.clear()
                    self.num_cleared += 1
                case _:
                    raise AssertionError(event)
        self.translator.check_invariants()
        return translation.lacking


def test_blocks_get_the_keys_of_the_prompt_that_they_hold() -> None:
    replica = Replica()
    assert replica.hears(stored([100, 101], None, [1, 2, 3, 4])) is None
    assert replica.hears(stored([102], 101, [5, 6])) is None
    assert replica.keys == set(chain([1, 2, 3, 4, 5, 6, 7]))
    assert replica.hears(removed(102)) is None
    assert replica.keys == set(chain([1, 2, 3, 4]))


def test_the_salt_and_the_adapter_are_part_of_the_key() -> None:
    replica = Replica()
    replica.hears(
        stored([1, 2], None, [1, 2, 3, 4], extra_keys=(("secret",), None)),
        stored([3, 4], None, [1, 2, 3, 4], lora_name="ada", extra_keys=(("ada",), ("ada",))),
        stored([5], None, [1, 2], lora_name="ada", extra_keys=(("ada", "secret"),)),
    )
    ids = [1, 2, 3, 4]
    expected = {*chain(ids, "secret"), *chain(ids, "", "ada"), *chain(ids[:2], "secret", "ada")}
    assert replica.keys == expected
    assert len(expected) == 5
    assert expected.isdisjoint(chain(ids))


def test_a_block_behind_an_unknown_parent_is_left_out_and_reported() -> None:
    replica = Replica()
    assert replica.hears(stored([9], 8, [1, 2])) == "a block's parent is not known"
    assert replica.hears(stored([10], 9, [3, 4])) == "a block's parent is not known"
    assert replica.keys == set()
    assert replica.translator.num_blocks == 0
    assert replica.hears(removed(9, 10)) is None


def test_another_block_size_is_reported() -> None:
    lacking = Replica().hears(stored([1], None, [1, 2, 3, 4], block_size=4))
    assert lacking is not None
    assert "4 tokens" in lacking


def test_images_have_no_key_and_neither_has_what_follows_them() -> None:
    replica = Replica()
    extras = (None, (["image", 2],), None)
    assert replica.hears(stored([1, 2, 3], None, [1, 2, 3, 3, 4, 5], extra_keys=extras)) is None
    assert replica.hears(stored([4], 3, [6, 7])) is None
    assert replica.keys == set(chain([1, 2]))
    replica.hears(removed(4, 3, 2, 1))
    assert replica.keys == set()


def test_a_block_in_two_tiers_is_gone_when_both_let_go_of_it() -> None:
    replica = Replica()
    replica.hears(stored([1], None, [1, 2], medium="GPU"), stored([1], None, [1, 2], medium="CPU"))
    replica.hears(removed(1, medium="GPU"))
    assert replica.keys == set(chain([1, 2]))
    assert replica.hears(stored([2], 1, [3, 4], medium="GPU")) is None, "the parent is known from the other tier"
    replica.hears(removed(1, medium="CPU"), removed(2, medium="GPU"))
    assert replica.keys == set()


def test_sliding_windows_do_not_count() -> None:
    replica = Replica()
    replica.hears(
        stored([1], None, [1, 2], group_idx=0, kv_cache_spec_kind="full_attention"),
        stored([1], None, [1, 2], group_idx=1, kv_cache_spec_kind="sliding_window"),
        removed(1, group_idx=1),
    )
    assert replica.keys == set(chain([1, 2]))
    replica.hears(removed(1, group_idx=0))
    assert replica.keys == set()


def test_cleared_forgets_everything() -> None:
    replica = Replica()
    assert replica.hears(stored([9], 8, [1, 2]), wire.AllBlocksCleared()) is None, "what lacked is gone, too"
    replica.hears(stored([1], None, [1, 2]), wire.AllBlocksCleared())
    assert (replica.num_cleared, replica.keys, replica.translator.num_blocks) == (2, set(), 0)
    assert replica.hears(stored([2], 1, [3, 4])) is not None


def test_no_more_than_max_blocks_are_remembered() -> None:
    replica = Replica(max_blocks=3)
    replica.hears(stored([1, 2, 3, 4, 5], None, list(range(10))))
    assert replica.translator.num_blocks == 3
    assert replica.keys == set(chain(list(range(10)))[2:])


@given(st.data())
def test_equals_a_model_that_keeps_whole_prefixes(data: st.DataObject) -> None:
    """Blocks stored and removed at random, some twice: the router's keys are those of the prefixes still held."""
    replica, held = Replica(), dict[int, tuple[int, ...]]()
    ids_of = dict[int, tuple[int, ...]]()  # an engine hash means one prefix for ever
    for step in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(held)))
            del held[victim]
            replica.hears(removed(victim))
        else:
            parent = data.draw(st.sampled_from([None, *sorted(held)]))
            block = tuple(data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=2)))
            prefix = (*(held[parent] if parent is not None else ()), *block)
            known = [engine_hash for engine_hash, ids in ids_of.items() if ids == prefix]
            engine_hash = data.draw(st.sampled_from([*known, step])) if known else step
            ids_of[engine_hash] = held[engine_hash] = prefix
            assert replica.hears(stored([engine_hash], parent, list(block))) is None
        assert replica.keys == {chain(list(ids))[-1] for ids in held.values()}
