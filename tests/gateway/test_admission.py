"""The bound on what is under way, and the queue before it."""

from __future__ import annotations

import asyncio
import resource

import pytest

from engine_worker.contract.errors import ApiError
from gateway.admission import Admission, affordable_in_flight


async def waiting(admission: Admission) -> asyncio.Task[None]:
    """A task that stands in the queue."""
    before = admission.num_queued
    task = asyncio.create_task(admission.enter())
    while admission.num_queued == before:  # noqa: ASYNC110  # the task's first step
        await asyncio.sleep(0)
    return task


async def test_places_are_handed_on_in_the_order_of_arrival():
    admission = Admission(1, 10, 30.0)
    await admission.enter()
    first, second = await waiting(admission), await waiting(admission)
    admission.leave()
    await first
    assert not second.done()
    admission.leave()
    await second
    admission.leave()
    assert admission.num_in_flight == 0
    admission.check_invariants()


async def test_a_full_queue_refuses_at_once_with_a_time_to_come_back():
    admission = Admission(1, 1, 30.0)
    await admission.enter()
    task = await waiting(admission)
    with pytest.raises(ApiError) as caught:
        await admission.enter()
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert caught.value.retry_after_s
    admission.leave()
    await task
    admission.check_invariants()


async def test_the_wait_is_bounded_and_leaves_nothing_behind():
    admission = Admission(1, 5, 0.01)
    await admission.enter()
    with pytest.raises(ApiError) as caught:
        await admission.enter()
    assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
    admission.leave()
    assert (admission.num_in_flight, admission.num_queued) == (0, 0)


async def test_one_that_leaves_the_queue_gives_its_place_to_the_next():
    admission = Admission(1, 5, 30.0)
    await admission.enter()
    first, second = await waiting(admission), await waiting(admission)
    admission.leave()  # first has the place and doesn't know it yet
    first.cancel()
    await second
    assert admission.num_in_flight == 1
    third = await waiting(admission)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert admission.num_queued == 0
    admission.leave()
    admission.check_invariants()


async def test_a_drained_gateway_lets_nothing_in_and_what_waits_goes_on():
    admission = Admission(1, 5, 30.0)
    await admission.enter()
    task = await waiting(admission)
    admission.is_closed = True
    with pytest.raises(ApiError) as caught:
        await admission.enter()
    assert caught.value.code == "draining"
    admission.leave()
    await task


def test_file_descriptors_bound_what_is_affordable():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 16 <= affordable_in_flight() <= max(16, soft)
