"""The whole core at random: arrivals, next turns, siblings, cancels, failures, resets and pools that force preemption.

Whatever happens, every request gets exactly the tokens of its solo run (or a true beginning of them), the fake cache
finds what it expects at every position, the invariants and the events agree after every call, and all blocks return.
"""

from __future__ import annotations

import hashlib
import random
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine_worker.core import block_pool
from engine_worker.core.scheduler import RequestTooLarge
from engine_worker.core.types import Request
from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request

VOCAB = 6  # small, so that prefixes repeat and stop tokens come up
TOKENS = st.integers(0, VOCAB - 1)


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.sampled_from([1, 2, 5, 16, 1000]),
        max_model_len=st.integers(6, 60),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        guesses=st.none() | st.integers(0, 1000).map(random.Random),
        joint_prefill_tokens=st.sampled_from([0, 4, 512]),
        enable_partial_hits=st.booleans(),
    )
    def start(self, guesses: random.Random | None, **limits: int) -> None:
        self.driver = make_driver(**limits, eos=frozenset({0}))  # type: ignore[arg-type]
        self.driver.guesses = guesses
        self.driver.runner.vocab_size = VOCAB
        self.num_made = 0

    @property
    def alive(self) -> list[str]:
        return [request_id for request_id in self.driver.requests if request_id not in self.driver.ends]

    def add(self, prompt: list[int], data: st.DataObject, leader_id: str | None = None) -> Request | None:
        self.num_made += 1
        request = make_request(
            f"r{self.num_made}",
            prompt,
            data.draw(st.integers(1, 30)),
            arrival_s=self.driver.now,
            salt=data.draw(st.sampled_from(["", "", "other"])) if leader_id is None else self.salt,
            priority=data.draw(st.sampled_from([0, 0, 0, 1, -1])) if leader_id is None else 0,
            work_s=data.draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
            leader_id=leader_id,
            ignore_eos=data.draw(st.booleans()),
            min_tokens=data.draw(st.sampled_from([0, 0, 3])),
            stop_token_ids=data.draw(st.sampled_from([(), (), (1,)])),
        )
        self.salt = request.salt
        try:
            self.driver.add(request)
        except RequestTooLarge:
            return None
        return request

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=40), data=st.data())
    def arrive(self, prompt: list[int], data: st.DataObject) -> None:
        self.add(prompt, data)

    @precondition(lambda self: self.driver.requests)
    @rule(more=st.lists(TOKENS, max_size=6), data=st.data())
    def come_back(self, more: list[int], data: st.DataObject) -> None:
        """A prompt that begins as another request's history does."""
        other = self.driver.requests[data.draw(st.sampled_from(sorted(self.driver.requests)))]
        history = [*other.prompt_ids, *other.output_ids]
        self.add(history[: data.draw(st.integers(1, len(history)))] + more, data)

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=30), n=st.integers(2, 4), data=st.data())
    def arrive_as_siblings(self, prompt: list[int], n: int, data: st.DataObject) -> None:
        leader = self.add(prompt, data)
        for _ in range(n - 1):
            self.add(prompt, data, leader_id=leader.request_id if leader else "refused")

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.alive)
    @rule(meanwhile=st.booleans(), data=st.data())
    def cancel(self, meanwhile: bool, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.alive))
        if meanwhile:
            self.driver.step(cancel_meanwhile=[request_id])
        else:
            assert self.driver.cancel(request_id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.driver.runner.fail.add(data.draw(st.sampled_from(self.alive)))

    @rule()
    def reset(self) -> None:
        self.driver.scheduler.reset_prefix_cache()
        self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_ended()


class WeakHashMachine(CoreMachine):
    """The same with a block hash of 3 bits: names collide all the time, and hits must still be true."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(block_pool, "hash_block", _weak_hash)
        self.patch.start()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.stop()


def _weak_hash(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    return bytes([hashlib.sha256(parent + bytes(token_ids)).digest()[0] & 7])


SETTINGS = settings(max_examples=50, stateful_step_count=25, deadline=None, derandomize=True)
CoreMachine.TestCase.settings = SETTINGS
WeakHashMachine.TestCase.settings = SETTINGS
TestCoreAtRandom = CoreMachine.TestCase
TestCoreWithCollidingHashes = WeakHashMachine.TestCase


def crowd(
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_batched_tokens: int,
    guess: bool = False,
    enable_partial_hits: bool = False,
) -> Driver:
    """Conversations that share prefixes, grow long, and don't fit together; some are cancelled in a step."""
    rng = random.Random(seed)
    driver = make_driver(
        num_blocks,
        block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_partial_hits=enable_partial_hits,
    )
    driver.guesses = random.Random(seed) if guess else None
    capacity = num_blocks * block_size
    for i in range(30):
        history = [rng.randrange(VOCAB) for _ in range(rng.randint(1, capacity // 3))]
        if driver.requests and rng.random() < 0.6:
            other = driver.requests[rng.choice(list(driver.requests))]
            history = [*other.prompt_ids, *other.output_ids][: capacity // 2] + history[:3]
        max_tokens = rng.randint(1, max(1, capacity - len(history)))
        driver.add(make_request(f"r{i}", history, max_tokens, arrival_s=driver.now, priority=rng.choice([0, 0, 0, 1])))
        for _ in range(rng.randint(0, 4)):
            driver.step(cancel_meanwhile=[f"r{rng.randint(0, i)}"] if rng.random() < 0.05 else [])
    driver.run()
    driver.check_ended()
    return driver


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 1000])
def test_crowds_that_force_preemption_get_their_solo_tokens(block_size: int, max_num_batched_tokens: int) -> None:
    stats = [crowd(seed, 32 // block_size, block_size, max_num_batched_tokens).scheduler.stats() for seed in range(3)]
    assert all(s.num_preemptions >= 5 for s in stats)
    assert all(s.prefix_cache_hits > 0 for s in stats)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 1000])
def test_crowds_get_their_solo_tokens_with_speculation_too(block_size: int, max_num_batched_tokens: int) -> None:
    stats = [
        crowd(seed, 32 // block_size, block_size, max_num_batched_tokens, True).scheduler.stats() for seed in (0, 1)
    ]
    assert all(s.num_preemptions >= 5 for s in stats)
    assert all(0 < s.num_accepted_tokens < s.num_draft_tokens for s in stats)


@pytest.mark.parametrize("guess", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 1000])
def test_crowds_get_their_solo_tokens_with_parts_of_blocks_copied(max_num_batched_tokens: int, guess: bool) -> None:
    for seed in (0, 1):
        driver = crowd(seed, 8, 4, max_num_batched_tokens, guess, enable_partial_hits=True)
        assert driver.scheduler.stats().num_preemptions >= 3
        assert driver.runner.num_copied > 0
