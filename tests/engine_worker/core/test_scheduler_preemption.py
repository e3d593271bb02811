"""When blocks run out: who gives way, what a resume keeps, and that somebody always advances."""

from __future__ import annotations

import pytest

from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request, shape


def crowded(num_blocks: int = 10) -> Driver:
    """Three requests of 4 blocks each at the end, admitted together into a smaller pool."""
    driver = make_driver(num_blocks=num_blocks)
    for i in range(3):
        driver.add(make_request("abc"[i], range(i * 10, i * 10 + 8), max_tokens=9, arrival_s=i))
    return driver


def test_the_last_to_arrive_is_preempted_and_resumes_on_its_cached_blocks() -> None:
    driver = crowded()
    plans = driver.run()
    preempted = [request_id for plan in plans for request_id in plan.preempted]
    assert preempted == ["c"]
    resumed = next(
        s for plan in plans for s in plan.segments if s.request.request_id == "c" and 0 < s.start < s.end - 1
    )
    assert resumed.start == 8, "its prompt's two blocks were still cached"
    assert resumed.end > 8 + 1, "sampled tokens are recomputed, not dropped"
    assert driver.requests["c"].num_preemptions == driver.scheduler.stats().num_preemptions == 1
    assert driver.requests["c"].num_cached_tokens == 0, "a resume is no hit of the prompt"
    driver.check_ended()


def test_priority_decides_who_is_preempted() -> None:
    driver = make_driver(num_blocks=10)
    for i, priority in enumerate((1, 0, 0)):
        driver.add(make_request("abc"[i], range(i * 10, i * 10 + 8), max_tokens=9, arrival_s=i, priority=priority))
    assert {request_id for plan in driver.run() for request_id in plan.preempted} == {"a"}
    driver.check_ended()


def test_nobody_is_preempted_for_a_later_one() -> None:
    """The last in the order stalls, keeps its blocks, and goes on when others end."""
    driver = make_driver(num_blocks=4)
    driver.add(make_request("old", range(4), max_tokens=5))
    driver.add(make_request("young", range(10, 17), max_tokens=6, arrival_s=1.0))
    stalled = 0
    while driver.scheduler.has_work():
        num_running = driver.scheduler.stats().num_running
        plan = driver.step()
        assert not plan.preempted
        stalled += len(plan.segments) < num_running
    assert stalled
    driver.check_ended()


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 7, 100])
def test_a_pool_that_fits_one_at_a_time_serves_all(
    block_size: int, enable_prefix_caching: bool, max_num_batched_tokens: int
) -> None:
    """Chunked prefill advances, and the first in the order always does, even when the cache retains nothing."""
    driver = make_driver(
        num_blocks=16 // block_size,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    driver.add(*(make_request(str(i), range(i, i + 3 + i), max_tokens=17 - 3 - i, arrival_s=i) for i in range(6)))
    driver.run(most_steps=1000)
    driver.check_ended()


def test_a_prefill_under_way_is_not_starved_by_a_full_pool() -> None:
    """A long prompt whose chunks find no block takes them from those after it."""
    driver = make_driver(num_blocks=8, max_num_batched_tokens=4)
    driver.add(make_request("long", range(28), arrival_s=0.0))
    driver.step()
    driver.add(*(make_request(str(i), [50 + i], max_tokens=20, arrival_s=1.0 + i) for i in range(4)))
    steps_until_done = 0
    while "long" not in driver.ends:
        driver.step()
        steps_until_done += 1
    assert steps_until_done <= 28
    driver.run()
    driver.check_ended()


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    driver = make_driver(num_blocks=8)
    driver.add(make_request("running", range(15), max_tokens=5))
    driver.step()
    driver.add(make_request("big", range(50, 70), arrival_s=1.0), make_request("small", [9], arrival_s=2.0))
    assert [s[0] for s in shape(driver.step())] == ["running"]
    ends = [request_id for plan in driver.run() for request_id, _, _, _ in shape(plan) if request_id != "running"]
    assert ends == ["big", "small"]


def test_an_admission_leaves_running_ones_room_for_a_block() -> None:
    """Otherwise the newcomer would be preempted a moment later, and its prefill wasted."""
    driver = make_driver(num_blocks=5)
    driver.add(make_request("a", range(8), max_tokens=8))
    driver.step()
    driver.add(make_request("b", range(20, 27), max_tokens=5, arrival_s=1.0))
    assert driver.scheduler.stats().num_free_blocks == 3
    assert not any(plan.preempted for plan in driver.run())
    driver.check_ended()


def test_no_room_is_kept_for_one_that_has_all_it_will_need() -> None:
    driver = make_driver(num_blocks=4)
    driver.add(make_request("a", range(8), max_tokens=4))
    driver.step()
    driver.add(make_request("b", range(20, 24), arrival_s=1.0))
    assert shape(driver.step()) == [("a", 8, 9, True), ("b", 0, 4, True)]
    driver.run()
    driver.check_ended()


def test_admissions_of_one_step_leave_each_other_room() -> None:
    driver = make_driver(num_blocks=5)
    driver.add(make_request("a", range(8), max_tokens=5), make_request("b", range(20, 32), max_tokens=5))
    plans = driver.run()
    assert [s[0] for s in shape(plans[0])] == ["a"]
    assert not any(plan.preempted for plan in plans)
    driver.check_ended()


def test_the_last_free_block_goes_to_the_first_in_the_order() -> None:
    driver = make_driver(num_blocks=5)
    driver.add(make_request("old", range(7), max_tokens=5), make_request("young", range(20, 27), max_tokens=5))
    driver.step()
    assert shape(driver.step()) == [("old", 7, 8, True), ("young", 7, 8, True)]
    plan = driver.step()
    assert (shape(plan), plan.preempted) == ([("old", 8, 9, True)], ())
    driver.run()
    driver.check_ended()


def test_a_plan_that_preempts_admits_nobody() -> None:
    driver = make_driver(num_blocks=6)
    driver.add(make_request("old", range(8), max_tokens=9, priority=-1))
    driver.add(make_request("young", range(20, 28), max_tokens=9))
    driver.step()
    driver.step()
    driver.add(make_request("urgent", [40], priority=-1))
    plans = driver.run()
    at = next(i for i, plan in enumerate(plans) if plan.preempted)
    assert [s[0] for s in shape(plans[at])] == ["old"]
    assert [s[0] for s in shape(plans[at + 1])] == ["old", "urgent"]
    driver.check_ended()


def overtaken(max_num_batched_tokens: int, num_blocks: int) -> Driver:
    """A younger one decodes, a block a token, while an urgent prompt of 10 tokens is on its way in chunks."""
    driver = make_driver(num_blocks, block_size=1, max_num_batched_tokens=max_num_batched_tokens)
    driver.add(make_request("young", [40], max_tokens=12))
    driver.step()
    driver.add(make_request("urgent", range(10), max_tokens=2, priority=-1))
    return driver


def test_a_chunk_shrinks_to_the_free_blocks_before_anybody_is_preempted() -> None:
    driver = overtaken(max_num_batched_tokens=5, num_blocks=13)
    plans = [driver.step() for _ in range(4)]
    assert [shape(plan)[-1] for plan in plans[:3]] == [
        ("urgent", 0, 4, False),
        ("urgent", 4, 8, False),
        ("urgent", 8, 9, False),
    ]
    assert [plan.preempted for plan in plans] == [(), (), (), ("young",)]
    driver.run()
    driver.check_ended()


def test_what_was_planned_for_a_victim_goes_to_the_one_it_gave_way_to() -> None:
    """The younger one's decode is in the plan already when the prompt's chunk finds no block."""
    driver = overtaken(max_num_batched_tokens=2, num_blocks=14)
    while driver.scheduler.stats().num_free_blocks != 1:
        driver.step()
    plan = driver.step()
    assert (shape(plan), plan.preempted) == ([("urgent", 6, 8, False)], ("young",))
    driver.run()
    driver.check_ended()


def test_the_time_of_the_first_plan_is_noted_once() -> None:
    driver = crowded()
    driver.run()
    assert driver.requests["c"].num_preemptions
    assert [driver.requests[name].first_planned_s for name in "abc"] == [1.0, 1.0, 1.0]
