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
    driver = make_driver(num_blocks=4)
    driver.add(make_request("a", range(8), max_tokens=8))
    driver.step()
    driver.add(make_request("b", range(20, 27), arrival_s=1.0))
    plans = driver.run()
    assert not any(plan.preempted for plan in plans)
    driver.check_ended()


def test_the_time_of_the_first_plan_is_noted_once() -> None:
    driver = crowded()
    driver.run()
    assert driver.requests["c"].num_preemptions
    assert [driver.requests[name].first_planned_s for name in "abc"] == [1.0, 1.0, 1.0]
