"""Prompts that share what a prefill under way computes wait for it, and nobody waits who would lose by it."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from engine_worker.core import block_pool
from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request, shape

PROMPT = range(100, 140)  # 10 blocks


def computed(driver: Driver) -> int:
    return driver.runner.num_computed


def test_copies_that_come_together_are_computed_once() -> None:
    driver = make_driver(joint_prefill_tokens=0)
    driver.add(*(make_request(name, PROMPT) for name in "abc"))
    assert shape(driver.step()) == [("a", 0, 40, True)]
    assert shape(driver.step()) == [("b", 36, 40, True), ("c", 36, 40, True)]
    driver.check_ended()


def test_branches_wait_for_the_stem_only() -> None:
    driver = make_driver(joint_prefill_tokens=0)
    driver.add(make_request("a", PROMPT), make_request("b", [*PROMPT[:20], *range(10)]))
    driver.add(make_request("other", range(50)))
    assert shape(driver.step()) == [("a", 0, 40, True), ("other", 0, 50, True)]
    assert shape(driver.step()) == [("b", 20, 30, True)]
    driver.check_ended()


def test_a_copy_sent_as_short_does_not_overtake_the_one_that_computes_its_prompt() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("first", PROMPT, work_s=4.0))
    driver.step()
    driver.add(make_request("copy", PROMPT, arrival_s=1.0, work_s=0.01))
    assert shape(driver.step()) == [("first", 16, 32, False)]
    assert shape(driver.step()) == [("first", 32, 40, True)]
    assert shape(driver.step()) == [("copy", 36, 40, True)]
    driver.check_ended()


def test_a_short_prompt_does_not_wait_for_a_chunk_that_is_long_beside_what_it_shares() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("long", range(100), work_s=8.0))
    driver.step()
    shares_a_block = [*range(20), 60, 61]
    driver.add(make_request("short", shares_a_block, arrival_s=1.0, work_s=0.1))
    assert shape(driver.step())[0] == ("short", 16, 22, True)
    driver.run()
    driver.check_ended()


@pytest.mark.parametrize("why", ["salt", "no cache", "reads no cache", "within a block"])
def test_nobody_waits_for_what_will_be_no_hit(why: str) -> None:
    driver = make_driver(enable_prefix_caching=why != "no cache", joint_prefill_tokens=0)
    prompt = PROMPT[:4] if why == "within a block" else PROMPT
    scores = {"num_prompt_logprobs": 0} if why == "reads no cache" else {}
    driver.add(make_request("a", prompt), make_request("b", prompt, salt="b" if why == "salt" else "", **scores))
    assert [s[0] for s in shape(driver.step())] == ["a", "b"]
    driver.run()
    driver.check_ended()


def test_who_is_waited_for_may_be_cancelled() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT), make_request("b", PROMPT))
    assert shape(driver.step()) == [("a", 0, 16, False)]
    driver.cancel("a")
    assert shape(driver.step()) == [("b", 16, 32, False)]
    driver.run()
    driver.check_ended()


def test_after_a_reset_nobody_waits_for_blocks_that_will_not_be_cached() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.add(make_request("b", PROMPT, arrival_s=-1.0))
    assert "b" in [s[0] for s in shape(driver.step())]
    driver.run()
    driver.check_ended()


def test_a_crowd_that_waits_is_not_hashed_in_one_step() -> None:
    driver = make_driver(max_num_seqs=4, max_num_batched_tokens=16)
    driver.add(*(make_request(str(number), PROMPT) for number in range(30)))
    for _ in range(2):
        driver.step()
    with mock.patch.object(block_pool, "hash_block", side_effect=block_pool.hash_block) as hashed:
        plan = driver.scheduler.plan(3.0)  # with room for others behind the last chunk
    assert shape(plan) == [("0", 32, 40, True)]
    assert 4 <= hashed.call_count <= 4 * len(PROMPT) // 4
    driver.scheduler.commit(plan, driver.runner.execute(plan))
    assert [s[0] for s in shape(driver.scheduler.plan(4.0))] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("seed", range(40))
def test_random_families_of_prompts_are_all_answered(seed: int) -> None:
    rng = random.Random(seed)
    driver = make_driver(
        num_blocks=rng.choice([16, 30, 200]),
        max_num_batched_tokens=rng.choice([7, 16, 64, 1000]),
        joint_prefill_tokens=rng.choice([0, 24]),
        enable_partial_hits=rng.random() < 0.5,
    )
    stems = [[rng.randrange(50) for _ in range(rng.randint(3, 30))] for _ in range(2)]
    for number in range(14):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randint(2, len(stem))], *(rng.randrange(50) for _ in range(rng.randint(0, 9)))] or [1]
        work_s, arrival_s = rng.choice([0.0, 0.1, 3.0]), driver.now + rng.random()
        driver.add(make_request(str(number), prompt, rng.randint(1, 6), arrival_s=arrival_s, work_s=work_s))
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            if driver.scheduler.has_work():
                driver.step()
    driver.run()
    driver.check_ended()
