"""What a step computes and in which order; hits; siblings; counts."""

from __future__ import annotations

import pytest

from engine_worker.core.types import FinishReason, StepPlan
from engine_worker.core.waiting_queue import key_of
from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request, shape

# -- what a step computes


def test_a_prompt_then_a_token_a_step() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(6), max_tokens=3))
    plans = driver.run()
    assert [shape(plan) for plan in plans] == [[("a", 0, 6, True)], [("a", 6, 7, True)], [("a", 7, 8, True)]]
    driver.check_ended()
    assert driver.ends == {"a": FinishReason.LENGTH}


def test_an_idle_scheduler_plans_nothing() -> None:
    driver = make_driver()
    assert not driver.scheduler.has_work()
    assert driver.step() == StepPlan(())


def test_a_long_prompt_comes_in_chunks_beside_decodes() -> None:
    driver = make_driver(max_num_batched_tokens=5)
    driver.add(make_request("a", range(3), max_tokens=9))
    driver.step()
    driver.add(make_request("b", range(50, 60), max_tokens=2))
    assert shape(driver.step()) == [("a", 3, 4, True), ("b", 0, 4, False)]
    assert shape(driver.step()) == [("a", 4, 5, True), ("b", 4, 8, False)]
    assert shape(driver.step()) == [("a", 5, 6, True), ("b", 8, 10, True)]
    driver.run()
    driver.check_ended()


def test_decodes_come_before_older_prefills_and_those_before_admissions() -> None:
    driver = make_driver(max_num_batched_tokens=8, max_num_seqs=4, joint_prefill_tokens=0)
    driver.add(make_request("young", range(3), max_tokens=9, arrival_s=5.0))
    driver.step()
    driver.add(make_request("old", range(20, 40), arrival_s=1.0), make_request("new", range(60, 70), arrival_s=2.0))
    assert [s[0] for s in shape(driver.step())] == ["young", "old"]
    assert [s[0] for s in shape(driver.step())] == ["young", "old"]
    assert shape(driver.step()) == [("young", 5, 6, True), ("old", 14, 20, True), ("new", 0, 1, False)]


def test_admission_goes_by_priority_then_arrival_then_order_of_coming() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add(
        make_request("late", [1], arrival_s=3.0),
        make_request("first", [1], arrival_s=1.0),
        make_request("second", [1], arrival_s=1.0),
        make_request("urgent", [1], arrival_s=9.0, priority=-1),
        make_request("patient", [1], arrival_s=0.0, priority=1),
    )
    order = [shape(plan)[0][0] for plan in driver.run()]
    assert order == ["urgent", "first", "second", "late", "patient"]


def test_the_shortest_work_goes_first_and_a_second_of_it_is_worth_20_of_waiting() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add(
        make_request("long", [1], arrival_s=0.0, work_s=2.0),  # as if it had come at 40
        make_request("short", [1], arrival_s=30.0, work_s=0.1),
        make_request("unknown", [1], arrival_s=31.0),
        make_request("later", [1], arrival_s=39.0, work_s=0.1),
    )
    assert [shape(plan)[0][0] for plan in driver.run()] == ["unknown", "short", "long", "later"]


def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_one() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("long", range(40), work_s=4.0))
    driver.step()
    driver.add(make_request("short", range(50, 55), arrival_s=1.0, work_s=0.5))
    assert shape(driver.step()) == [("short", 0, 5, True)]
    assert shape(driver.step()) == [("long", 8, 16, False)]
    driver.run()
    driver.check_ended()


@pytest.mark.parametrize(("work_s", "goes_first"), [(0.9, "shorter"), (1.1, "first")])
def test_a_prompt_under_way_is_interrupted_for_less_than_is_left_of_it_alone(work_s: float, goes_first: str) -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("first", range(18), work_s=1.8))
    driver.step()  # 10 of 18 are left
    driver.add(make_request("shorter", range(50, 59), work_s=work_s))
    assert shape(driver.step())[0][0] == goes_first
    driver.run()
    driver.check_ended()


def test_a_preempted_prompt_has_its_first_place() -> None:
    request = make_request("a", range(20), arrival_s=3.0, work_s=0.5)
    assert key_of(request, 7) == (0, 13.0, 7)
    request.num_cached_tokens, request.num_computed = 4, 12
    assert key_of(request, 7) == (0, 8.0, 7)
    request.output_ids, request.num_computed = [1, 2, 3], 0
    assert key_of(request, 7) == (0, 13.0, 7)


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_completes_a_prompt_is_not_filled_with_a_chunk_of_another(waits: bool) -> None:
    driver = make_driver(max_num_batched_tokens=8, joint_prefill_tokens=5 if waits else 0)
    driver.add(make_request("first", range(13)), make_request("long", range(20, 40), arrival_s=1.0))
    assert shape(driver.step()) == [("first", 0, 8, False)]
    rest = [] if waits else [("long", 0, 3, False)]
    assert shape(driver.step()) == [("first", 8, 13, True), *rest]
    start = rest[0][2] if rest else 0
    assert shape(driver.step()) == [("long", start, start + 8, False)]
    driver.run()
    driver.check_ended()


def test_prompts_are_completed_together_up_to_the_bound_and_a_longer_one_alone() -> None:
    driver = make_driver(joint_prefill_tokens=10)
    driver.add(make_request("decoding", range(3), max_tokens=9))
    driver.step()
    prompts = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 2}
    driver.add(*(make_request(name, range(ord(name), ord(name) + n), arrival_s=1.0) for name, n in prompts.items()))
    completed = [[s[0] for s in shape(driver.step())] for _ in range(4)]
    assert completed == [["decoding", "a", "b"], ["decoding", "c"], ["decoding", "d"], ["decoding", "e"]]
    driver.run()
    driver.check_ended()


def test_no_more_than_max_num_seqs_run_and_never_more_than_the_budget_lets_decode() -> None:
    for max_num_seqs, max_num_batched_tokens in ((3, 100), (100, 3)):
        driver = make_driver(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        driver.add(*(make_request(str(i), [i], max_tokens=5) for i in range(7)))
        for _ in range(3):
            assert len(driver.step().segments) == 3
            assert driver.scheduler.stats().num_running == 3
        driver.run()
        driver.check_ended()


# -- the prefix cache


@pytest.mark.parametrize("num_prompt", [1, 4, 7, 8, 9, 16])
def test_a_fully_cached_prompt_computes_what_is_left_of_its_last_block(num_prompt: int) -> None:
    driver = make_driver()
    driver.add(make_request("a", range(num_prompt)))
    driver.run()
    driver.add(make_request("b", range(num_prompt)))
    start = (num_prompt - 1) // 4 * 4
    assert shape(driver.step()) == [("b", start, num_prompt, True)]
    driver.check_ended()


def test_the_next_turn_hits_prompt_and_answer_of_the_last() -> None:
    driver = make_driver()
    driver.add(make_request("turn 1", range(10), max_tokens=7))
    driver.run()
    driver.add(make_request("turn 2", [*range(10), *driver.outputs["turn 1"], 90, 91], max_tokens=7))
    driver.run()
    assert driver.first_starts == {"turn 1": 0, "turn 2": 16}
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10 + 19, 16)
    driver.check_ended()


def test_cold_warm_and_disabled_caches_give_the_same_tokens() -> None:
    outputs = []
    for enable_prefix_caching in (True, False):
        driver = make_driver(enable_prefix_caching=enable_prefix_caching)
        for name in ("cold", "warm"):
            driver.add(make_request(name, range(13), max_tokens=11))
            driver.run()
        driver.check_ended()
        outputs += driver.outputs.values()
    assert all(output == outputs[0] for output in outputs)


def test_one_salt_never_reads_what_another_computed() -> None:
    """The fake cache knows whose KV a slot holds, so a hit across salts would fail in the runner, too."""
    driver = make_driver()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "")):
        driver.add(make_request(name, range(13), salt=salt))
        driver.run()
    assert driver.first_starts == {"a": 0, "b": 0, "c": 0}


def test_a_reset_while_running_changes_no_output() -> None:
    driver = make_driver(max_num_batched_tokens=6)
    driver.add(make_request("a", range(20), max_tokens=9))
    driver.step()
    plan = driver.scheduler.plan(0.0)
    driver.scheduler.reset_prefix_cache()
    result = driver.runner.execute(plan)
    driver.scheduler.commit(plan, result)
    driver.run()
    driver.add(make_request("b", range(20)))
    driver.run()
    assert driver.first_starts["b"] == 0
    driver.check_ended()


# -- siblings (n > 1)


def siblings(driver: Driver, n: int, prompt: range, max_tokens: int = 4) -> None:
    for i in range(n):
        driver.add(make_request(f"r{i}", prompt, max_tokens, leader_id="r0" if i else None))


def test_followers_wait_for_the_leaders_prompt_and_hit_it() -> None:
    driver = make_driver(max_num_batched_tokens=6)
    siblings(driver, 3, range(13))
    assert driver.scheduler.stats().queued_prefill_tokens == 13 + 1 + 1
    plans = driver.run()
    assert [[s[0] for s in shape(plan)] for plan in plans[:4]] == [["r0"], ["r0"], ["r0"], ["r0", "r1", "r2"]]
    assert driver.first_starts == {"r0": 0, "r1": 12, "r2": 12}
    driver.check_ended()


def test_others_may_overtake_followers_that_wait() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    siblings(driver, 2, range(6))
    driver.add(make_request("other", [50], arrival_s=5.0))
    assert [s[0] for s in shape(driver.step())] == ["r0", "other"]
    driver.run()
    driver.check_ended()


@pytest.mark.parametrize("end", ["cancelled waiting", "cancelled in prefill", "failed", "finished at once"])
def test_followers_go_on_when_their_leader_ends(end: str) -> None:
    driver = make_driver(max_num_batched_tokens=6)
    siblings(driver, 2, range(13), max_tokens=1 if end == "finished at once" else 4)
    if end == "cancelled waiting":
        driver.cancel("r0")
    elif end == "cancelled in prefill":
        driver.step()
        driver.cancel("r0")
    elif end == "failed":
        driver.runner.fail.add("r0")
    driver.run()
    assert driver.ends["r1"] is FinishReason.LENGTH
    driver.check_ended()


def test_followers_survive_the_preemption_of_their_leader() -> None:
    driver = make_driver(num_blocks=9, max_num_batched_tokens=4)
    driver.add(make_request("old", range(40, 44), max_tokens=20))
    driver.step()
    driver.add(make_request("r0", range(16), 5, arrival_s=1.0))
    driver.add(make_request("r1", range(16), 5, arrival_s=1.0, leader_id="r0"))
    driver.run()
    driver.check_ended()


def test_an_absent_leader_or_oneself_holds_nobody_back() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), leader_id="gone"), make_request("b", range(10, 15), leader_id="b"))
    assert [s[0] for s in shape(driver.step())] == ["a", "b"]


# -- counts


def test_stats_tell_load_and_cache() -> None:
    driver = make_driver(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=10, joint_prefill_tokens=0)
    driver.add(make_request("warm", range(12)))
    driver.run()
    driver.add(
        make_request("a", range(50, 58), max_tokens=9),
        make_request("b", range(60, 80)),
        make_request("c", range(14)),
    )
    assert driver.scheduler.stats().queued_prefill_tokens == 8 + 20 + (14 - 12)
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.queued_prefill_tokens == 20 - 2 + (14 - 12)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (20, 20 - 2 - 1, 3 + 2)
    driver.run()
    driver.check_ended()
