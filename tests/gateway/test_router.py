"""Placing: leases end once, requests that arrive together see each other, a policy may hold requests back."""

from __future__ import annotations

import asyncio

import pytest

from engine_worker.contract.errors import ApiError
from gateway.config import ReplicaSpec
from gateway.observe.metrics import FleetGauges, Metrics
from gateway.replicas.dialect import Report
from gateway.replicas.registry import Cut, Registry
from gateway.router import Router
from policies.events import FailureKind
from policies.fleet import FleetState
from policies.registry import make_policy
from policies.types import KeySpace, ReplicaStatus, RouteRequest


class Slots:
    """A hold that admits a request while fewer than `limit` are in flight."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.router: Router

    def rank(self, request, arrived_at, now):
        return 0.0

    def admits(self, request, now):
        return self.router.stats.num_in_flight < self.limit


def make(num_replicas=2, policy="least_loaded", hold=None) -> Router:
    router = Router(FleetState(), make_policy(policy), Metrics(FleetGauges), seed=0, hold=hold)
    specs = [ReplicaSpec(url=f"http://127.0.0.1:{8101 + n}") for n in range(num_replicas)]
    router.registry = Registry(specs, router.emit, lambda: 0.0)
    for replica in router.registry:
        report = Report(status=ReplicaStatus.READY, models=frozenset({"m"}), incarnation="a")
        router.registry.joins(replica, report, Cut(KeySpace("text"), 32, "text"))
    if hold is not None:
        hold.router = router
    return router


def request(router: Router, **fields) -> RouteRequest:
    return RouteRequest(request_id=router.new_id(), model="m", num_tokens=100, **fields)


async def test_requests_that_arrive_together_see_each_other():
    router = make()
    leases = await asyncio.gather(*(router.place(request(router)) for _ in range(10)))
    names = [lease.replica.replica_id for lease in leases]
    assert sorted(names.count(name) for name in set(names)) == [5, 5]
    assert router.stats.num_in_flight == 10
    for number, lease in enumerate(leases):
        if number % 2:
            lease.first_token(None)
            lease.finish(3, None, 100)
        else:
            lease.fail(FailureKind.BROKEN)
        assert not lease.is_open
    assert router.stats.num_in_flight == 0
    assert router.fleet.num_leases() == 0


async def test_a_lease_ends_once():
    router = make()
    lease = await router.place(request(router))
    lease.fail(FailureKind.CANCELLED)
    with pytest.raises(AssertionError):
        lease.finish(1, None, None)


async def test_excluded_replicas_are_not_chosen():
    router = make()
    first = await router.place(request(router))
    second = request(router, excluded=frozenset({first.replica.replica_id}))
    assert (await router.place(second)).replica is not first.replica
    nobody = request(router, excluded=frozenset(router.fleet.replica_ids()))
    assert router.num_candidates(nobody) == 0
    with pytest.raises(ApiError) as caught:
        await router.place(nobody)
    assert caught.value.status == 503
    assert caught.value.retry_after_s


async def test_an_unknown_model_is_a_404_and_a_known_one_that_is_down_a_503():
    router = make()
    with pytest.raises(ApiError) as caught:
        router.check_model("other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    for replica in router.registry:
        router.registry.set_status(replica, ReplicaStatus.DOWN, "gone")
    for model in ("m", "other"):
        with pytest.raises(ApiError) as caught:
            router.check_model(model)
        assert caught.value.status == 503


async def test_a_held_request_goes_when_a_place_is_free_and_in_order():
    router = make(hold=Slots(2))
    first, second = [await router.place(request(router)) for _ in range(2)]
    waiting = [asyncio.create_task(router.place(request(router), 30.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert router.stats.num_queued == 3
    first.finish(1, None, None)
    third = await waiting[0]
    assert not waiting[1].done()
    second.fail(FailureKind.BROKEN)
    third.fail(FailureKind.BROKEN)
    await asyncio.gather(*waiting)
    assert router.stats.num_queued == 0


async def test_a_held_request_gives_up_at_its_deadline():
    router = make(hold=Slots(0))
    with pytest.raises(ApiError) as caught:
        await router.place(request(router), 0.01)
    assert caught.value.status == 504
    assert router.stats.num_queued == 0


async def test_a_cancelled_wait_leaves_no_place_and_no_lease_behind():
    router = make(hold=Slots(1))
    lease = await router.place(request(router))
    waiting = asyncio.create_task(router.place(request(router), 30.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert router.stats.num_queued == 0
    late = asyncio.create_task(router.place(request(router), 30.0))
    await asyncio.sleep(0)
    lease.finish(1, None, None)  # gives `late` its lease, which it is cancelled before it sees
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert router.stats.num_in_flight == 0
    assert router.fleet.num_leases() == 0
