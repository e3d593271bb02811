"""The bound on what is under way, and the queue before it."""

from __future__ import annotations

import asyncio
import resource

import pytest

from engine_worker.contract.errors import ApiError
from gateway.admission import Admission, Claim, affordable_in_flight


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


async def test_tenants_take_turns_whatever_the_order_of_arrival():
    admission = Admission(1, 10, 30.0)
    await admission.enter(Claim("flood", cost=10.0))
    order: list[str] = []

    async def one(tenant: str) -> None:
        claim = Claim(tenant, cost=10.0)
        await admission.enter(claim)
        order.append(tenant)
        admission.leave(claim, 10.0)

    tasks = []
    for tenant in ("flood", "flood", "flood", "calm"):
        tasks.append(asyncio.create_task(one(tenant)))
        await asyncio.sleep(0)
    assert admission.num_queued == 4
    admission.check_invariants()
    admission.leave(Claim("flood", cost=10.0), 10.0)
    await asyncio.gather(*tasks)
    assert order.index("calm") <= 1
    assert admission.num_in_flight == 0
    admission.check_invariants()


async def test_each_model_has_the_room_of_its_replicas():
    room = {"small": 1, "large": 2}
    admission = Admission(100, 10, 30.0, room=lambda model: room.get(model, 0))
    await admission.enter(Claim(model="small"))
    waits = asyncio.create_task(admission.enter(Claim(model="small")))
    for _ in range(2):
        await admission.enter(Claim(model="large"))
    await asyncio.sleep(0)
    assert admission.num_queued == 1
    room["small"] = 2  # a replica came
    admission.pump()
    await waits
    for model in ("small", "small", "large", "large"):
        admission.leave(Claim(model=model))
    admission.check_invariants()


async def test_models_that_nobody_serves_leave_nothing_behind():
    admission = Admission(1, 1, 30.0, room=lambda model: 0)
    await admission.enter(Claim(model="first"))
    task = asyncio.create_task(admission.enter(Claim(model="second")))
    await asyncio.sleep(0)
    for number in range(5):
        with pytest.raises(ApiError):
            await admission.enter(Claim(model=f"made up {number}"))
    assert set(admission._lanes) == {"", "first", "second"}
    admission.leave(Claim(model="first"))
    await task
    admission.leave(Claim(model="second"))
    assert set(admission._lanes) == {""}
    admission.check_invariants()


async def test_a_full_queue_is_made_room_in_whatever_the_model():
    admission = Admission(1, 2, 30.0)
    await admission.enter(Claim("flood", model="a"))
    flooding = [asyncio.create_task(admission.enter(Claim("flood", model="a"))) for _ in range(2)]
    await asyncio.sleep(0)
    calm = asyncio.create_task(admission.enter(Claim("calm", model="b")))
    await asyncio.wait(flooding, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ApiError):
        await flooding[1]
    for model in ("a", "a", "b"):
        admission.leave(Claim("flood" if model == "a" else "calm", model=model))
        await asyncio.sleep(0)
    await asyncio.gather(flooding[0], calm)
    assert admission.num_in_flight == 0
    admission.check_invariants()


async def test_one_models_line_does_not_keep_anothers_waiting():
    admission = Admission(1, 100, 30.0)
    await admission.enter()
    flood = [asyncio.create_task(admission.enter(Claim("a", model="one"))) for _ in range(20)]
    await asyncio.sleep(0)
    other = asyncio.create_task(admission.enter(Claim("b", model="two")))
    await asyncio.sleep(0)
    assert admission.num_queued == 21
    admission.leave()
    for _ in range(2):  # at most one of the flood goes before it
        await asyncio.sleep(0)
        if other.done():
            break
        admission.leave(Claim("a", model="one"))
    await asyncio.sleep(0)
    assert other.done()
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    admission.leave(Claim("b", model="two"))
    admission.check_invariants()


async def test_one_that_leaves_as_its_turn_comes_is_charged_nothing():
    admission = Admission(1, 10, 30.0)
    await admission.enter()
    leaving, next_one = await waiting(admission), await waiting(admission)
    leaving.cancel()
    admission.leave()  # before the one that leaves has noticed
    await next_one
    await asyncio.gather(leaving, return_exceptions=True)
    admission.check_invariants()
    admission.leave()
    admission.check_invariants()
