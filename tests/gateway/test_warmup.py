"""A replica that comes back is warmed, one that drains hands over: through a gateway that serves."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.gateway.harness import Replica, Running, gateway, until

STORE = 1024 * 1024
SECRET = {"x-warmgate-secret": "s"}


def pair() -> tuple[Replica, Replica]:
    return Replica(incarnation="one"), Replica(incarnation="two")


def about(topic: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"a long story about {topic} " * 60}]}


def outcomes(running: Running) -> dict[tuple[str, str], int]:
    assert running.app.warmer is not None
    return dict(running.app.warmer.outcomes)


def by_name(running: Running, name: str) -> tuple[Replica, Replica]:
    """The replica of that name, and the other."""
    one, two = running.replicas
    return (one, two) if one.name == name else (two, one)


def blocks(running: Running, replica: Replica) -> int:
    return running.app.fleet.stats(running.app.registry.get(replica.name).replica_id).num_index_blocks


async def is_idle(running: Running) -> None:
    await until(lambda: running.app.warmer is not None and running.app.warmer.num_tasks == 0)


async def test_a_restarted_replica_gets_the_hottest_prompts() -> None:
    one, two = pair()
    async with gateway(one, two, policy="warm", warmup_store_bytes=STORE) as running:
        answer = await running.chat(stream=True, **about("caches"))
        warm, _ = by_name(running, answer.headers["x-warmgate-replica"])
        assert blocks(running, warm)
        warm.worker.incarnation = "another"
        await until(lambda: outcomes(running).get(("warmup", "done")) == 1)
        await is_idle(running)
        sent = msgspec.json.decode(warm.log.last_body)
        assert sent["messages"] == about("caches")["messages"]
        assert sent["max_tokens"] == 1
        assert "stream" not in sent
        assert blocks(running, warm), "and the router knows"
        assert running.events("warmgate_replays_total") == 1
        assert running.events("warmgate_hot_prompts") == 1


async def test_without_leave_no_prompt_is_kept_or_replayed() -> None:
    one, two = pair()
    async with gateway(one, two, policy="warm") as running:
        answer = await running.chat(**about("caches"))
        warm, _ = by_name(running, answer.headers["x-warmgate-replica"])
        warm.worker.incarnation = "another"
        await until(lambda: running.app.registry.get(warm.name).incarnation == "another")
        await is_idle(running)
        assert outcomes(running) == {}
        assert running.app.warmer is not None
        assert len(running.app.warmer.prompts) == 0
        assert one.log.num_started + two.log.num_started == 1


async def test_a_replay_that_fails_harms_nothing() -> None:
    one, two = pair()
    async with gateway(one, two, policy="warm", warmup_store_bytes=STORE) as running:
        answer = await running.chat(**about("caches"))
        warm, _ = by_name(running, answer.headers["x-warmgate-replica"])
        warm.play(fault="status", status=400)
        warm.worker.incarnation = "another"
        await until(lambda: outcomes(running).get(("warmup", "failed")) == 1)
        await is_idle(running)
        assert running.app.fleet.num_leases() == 0
        assert not running.app.registry.get(warm.name).gate.is_open


async def test_a_draining_replica_hands_its_prompts_over() -> None:
    one, two = pair()
    async with gateway(one, two, policy="warm", warmup_store_bytes=STORE, handover_s=1.0) as running:
        answer = await running.chat(stream=True, **about("caches"))
        leaving, staying = by_name(running, answer.headers["x-warmgate-replica"])
        assert blocks(running, staying) == 0
        leaving.play(status_name="draining")
        await until(lambda: outcomes(running).get(("handover", "done")) == 1)
        again = await running.chat(stream=True, **about("caches"))
        assert again.headers["x-warmgate-replica"] == staying.name
        assert int(again.headers["x-warmgate-matched-tokens"]) > 0, "it was warm there already"


async def test_what_others_hold_too_is_not_handed_over() -> None:
    one, two = pair()
    async with gateway(one, two, policy="round_robin", warmup_store_bytes=STORE, handover_s=0.2) as running:
        for _ in range(2):
            await running.chat(stream=True, **about("caches"))
        one.play(status_name="draining")
        await until(lambda: running.app.registry.get(one.name).status.value == "draining")
        await is_idle(running)
        assert outcomes(running) == {}


async def test_a_drain_over_time_ends_without_traffic_and_can_be_called_off() -> None:
    one, two = pair()
    async with gateway(one, two, policy="warm", warmup_store_bytes=STORE, secret="s", slow_start_s=0.0) as running:
        for number in range(8):
            await running.chat(stream=True, **about(f"topic {number}"))
        path = f"/admin/replicas/{one.name}/drain"
        told = await running.client.post(f"{path}?over_s=3600", headers=SECRET)
        assert told.status_code == 200
        replica = running.app.registry.get(one.name)
        assert replica.status.value == "ready", "it goes on for now"
        assert replica.gate.is_leaving
        assert (await running.client.delete(path, headers=SECRET)).status_code == 200
        assert not replica.gate.is_leaving
        await running.client.post(f"{path}?over_s=0.3", headers=SECRET)
        await until(lambda: replica.status.value == "draining")
        await is_idle(running)
        before = one.log.num_started
        for number in range(8):
            answer = await running.chat(stream=True, **about(f"topic {number}"))
            assert answer.headers["x-warmgate-replica"] == two.name
        assert one.log.num_started == before
        await running.client.delete(path, headers=SECRET)
        assert replica.status.value == "ready"


async def test_a_time_that_is_none_is_refused() -> None:
    one = Replica(incarnation="one")
    async with gateway(one, secret="s") as running:
        for over_s in ("soon", "-1", "1e9", "nan"):
            told = await running.client.post(f"/admin/replicas/{one.name}/drain?over_s={over_s}", headers=SECRET)
            assert told.status_code == 400
            assert "over_s" in told.json()["error"]["message"]
