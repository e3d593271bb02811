"""Shadow policies and the advice that follows: figures by hand, and through a gateway that serves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import msgspec
import pytest
from typer.testing import CliRunner

from gateway.cli import app as cli
from gateway.observe.advice import ENOUGH, advice_on, report
from gateway.observe.shadow import MAX_AWAITED, WINDOW, Faded, Shadows
from gateway.observe.watched import Seen, Told, together, watched_by
from policies.events import Dispatched, Failed, FailureKind, FirstToken
from policies.fleet import FleetState
from policies.registry import UnknownPolicy, make_policy
from policies.types import Decision, FleetSnapshot, ReplicaId, RouteRequest
from tests.gateway.harness import Replica, gateway
from tests.policies.support import chain, fleet_of, joined, request, serve


def shadows(*specs: str, share: float = 1.0) -> Shadows:
    return Shadows(specs, share, seed=1, clock=lambda: 0.0)


@pytest.fixture
def fleet() -> FleetState:
    """`a` holds the prompt, `b` nothing; both have shown their speed."""
    fleet = fleet_of("a", "b")
    for number in range(6):
        for name in "ab":
            serve(fleet, name, f"{name}{number}", f"{name}{number}" * 8, float(number), prefill_s=0.2)
    serve(fleet, "a", "warmup", "p" * 200, 10.0, prefill_s=1.0)
    return fleet


def decided(snapshot: FleetSnapshot, name: str) -> Decision:
    view = next(view for view in snapshot.replicas if view.replica_id == name)
    return Decision(view.replica_id, "live", "warm", view.matched_tokens, view.num_tokens, 0.0)


def numbered(count: int) -> Iterator[RouteRequest]:
    return (request(f"r{number}", "p" * 200) for number in range(count))


def watch(fleet: FleetState, watching: Shadows, live: str, count: int = ENOUGH) -> None:
    for each in numbered(count):
        snapshot = fleet.snapshot(each, 20.0)
        watching.decide(each, snapshot, decided(snapshot, live))
        watching.check_invariants()


def test_a_policy_that_finds_the_cache_would_pay(fleet: FleetState) -> None:
    watching = shadows("warm")
    watch(fleet, watching, live="b")
    [shadow] = watching.shadows
    advice = advice_on(shadow, "round_robin")
    assert advice.verdict == "pays"
    assert advice.figures["elsewhere_share"] == 1.0
    assert advice.figures["expected_ttft_s"] < advice.figures["live_expected_ttft_s"]
    assert advice.figures["cached_share"] > 0.9 > advice.figures["live_cached_share"]
    assert "warm would pay" in advice.sentence
    assert "--policy warm" in advice.sentence


def test_one_that_ignores_it_would_cost(fleet: FleetState) -> None:
    watching = shadows("round_robin")
    watch(fleet, watching, live="a")
    costly = advice_on(watching.shadows[0], "warm")
    assert costly.verdict == "costs"
    assert "with the caches as warm filled them" in costly.sentence
    assert watching.shadows[0].num_elsewhere > 0


def test_the_same_rule_makes_no_difference(fleet: FleetState) -> None:
    watching = shadows("warm")
    watch(fleet, watching, live="a")
    advice = advice_on(watching.shadows[0], "warm")
    assert advice.verdict == "same"
    assert advice.figures["difference_s"] == 0.0


def seen(difference_s: float, deviation_s: float, count: int = 300) -> Seen:
    """Sums of `count` decisions, of a live policy that takes a second."""
    squared = count * (deviation_s**2 + difference_s**2)
    sums = {field.name: 0.0 for field in dataclasses.fields(Faded)}
    sums |= {"count": count, "difference_s": count * difference_s, "squared": squared}
    sums |= {"live_total_s": count, "total_s": count * (1.0 + difference_s)}
    return Seen("warm", count, Faded(**sums))


def test_what_chance_could_explain_is_not_called_too_small() -> None:
    deviation_s = 0.18 / 2.3 * 300**0.5  # 2.3 standard errors, where 3 are asked for
    advice = advice_on(seen(-0.18, deviation_s), "round_robin")
    assert advice.verdict == "unsure"
    assert advice.sentence.startswith("warm may save 18%, ± 23%, not certain yet: over 300 decisions")
    assert advice.sentence.endswith("Ask again after more requests.")
    assert advice_on(seen(0.18, deviation_s), "round_robin").sentence.startswith("warm may cost 18%, ± 23%")
    assert advice_on(seen(-0.18, deviation_s / 2), "round_robin").verdict == "pays"
    assert advice_on(seen(-0.04, 0.01), "round_robin").verdict == "same"
    assert advice_on(seen(0.0, 0.0), "round_robin").verdict == "same"


def test_too_few_decisions_tell_nothing(fleet: FleetState) -> None:
    watching = shadows("warm")
    watch(fleet, watching, live="b", count=ENOUGH - 1)
    assert advice_on(watching.shadows[0], "round_robin").verdict == "too_few"


def test_delays_to_others_count(fleet: FleetState) -> None:
    for number in range(8):
        fleet.apply(Dispatched(20.0, ReplicaId("a"), f"w{number}", chain(f"{number}" * 4), 0))
    watching = shadows("round_robin")
    each = request("r", "p" * 200)
    snapshot = fleet.snapshot(each, 20.0)
    watching.decide(each, snapshot, decided(snapshot, "a"))
    shadow = watching.shadows[0]
    assert shadow.live_total_s > shadow.live_own_s


def test_a_shadow_that_remembers_hears_of_what_happened_and_decides_before_it(fleet: FleetState) -> None:
    watching = shadows("approximate_tree")
    each = request("r", "q" * 12)
    for name in "ab":
        watching.observe(joined(name))
    watching.observe(Dispatched(19.0, ReplicaId("b"), "earlier", chain("q" * 12), 0))
    snapshot = fleet.snapshot(each, 20.0)
    watching.decide(each, snapshot, decided(snapshot, "a"))
    assert watching.shadows[0].num_elsewhere == 1, "it knows who has the prompt"


def test_only_the_share_is_watched(fleet: FleetState) -> None:
    watching = shadows("warm", share=0.0)
    watch(fleet, watching, live="b", count=50)
    assert watching.shadows[0].num_decisions == 0
    watching = shadows("warm", share=0.5)
    watch(fleet, watching, live="b", count=200)
    assert 60 < watching.shadows[0].num_decisions < 140


def test_a_shadow_that_fails_costs_nobody_a_request(fleet: FleetState) -> None:
    class Broken:
        name = "broken"

        def choose(self, request: RouteRequest, fleet: FleetSnapshot, rng: random.Random) -> Decision:
            raise RuntimeError

    watching = shadows("warm")
    watching.shadows[0].policy = Broken()
    watch(fleet, watching, live="b", count=3)
    assert (watching.shadows[0].num_failed, watching.shadows[0].num_decisions) == (3, 0)


def test_old_decisions_fade() -> None:
    fleet = fleet_of("a", "b")
    watching = shadows("warm")
    each = request("r", "p")
    snapshot = fleet.snapshot(each, 1.0)
    for _ in range(200):
        watching.decide(each, snapshot, decided(snapshot, "a"))
    assert watching.shadows[0].faded.count < 200
    assert watching.shadows[0].faded.count == pytest.approx(WINDOW * (1 - (1 - 1 / WINDOW) ** 200))


def test_expected_seconds_are_held_against_what_came(fleet: FleetState) -> None:
    watching = shadows("warm")
    for number, each in enumerate(numbered(2 * ENOUGH)):
        snapshot = fleet.snapshot(each, 20.0)
        watching.decide(each, snapshot, decided(snapshot, "a"))
        watching.observe(FirstToken(25.0, ReplicaId("a"), f"r{number}"))
    told = report(watching, "warm")
    assert told["realised_ttft_s"] == pytest.approx(5.0)
    assert "Take these seconds with care" in told["sentences"][-1]


def test_what_two_processes_saw_adds_up(fleet: FleetState) -> None:
    one, two, both = (shadows("warm", "round_robin") for _ in range(3))
    for watching, name, count in ((one, "a", 150), (two, "b", 120)):
        watch(fleet, watching, live=name, count=count)
        watch(fleet, both, live=name, count=count)
    parts = [
        msgspec.json.decode(msgspec.json.encode({"sums": watched_by(each)}), type=Told).sums for each in (one, two)
    ]
    told, expected = report(together(parts), "round_robin"), report(both, "round_robin")
    assert report(one, "round_robin")["policies"][0]["verdict"] == "too_few", "neither could tell alone"
    assert [each["verdict"] for each in told["policies"]] == [each["verdict"] for each in expected["policies"]]
    for figure in ("num_decisions", "elsewhere_share", "difference_s", "cached_share"):
        assert told["policies"][0][figure] == pytest.approx(expected["policies"][0][figure], rel=0.01), figure


def test_what_is_awaited_is_bounded_and_ends_with_its_request(fleet: FleetState) -> None:
    watching = shadows("warm")
    watch(fleet, watching, live="a", count=MAX_AWAITED + 10)
    for number in range(MAX_AWAITED):
        watching.observe(Failed(21.0, ReplicaId("a"), f"r{number}", FailureKind.CANCELLED))
    assert not watching._awaited


def test_an_unknown_shadow_is_refused() -> None:
    with pytest.raises(UnknownPolicy, match="nonsense"):
        shadows("nonsense")


async def test_a_gateway_advises_from_its_own_traffic() -> None:
    one, two = Replica(incarnation="1"), Replica(incarnation="2")
    specs = ["warm", "least_loaded", "sticky"]
    async with gateway(one, two, policy="round_robin", shadow_policies=specs, shadow_share=1.0) as running:
        for number in range(20):
            await running.chat(stream=True, messages=[{"role": "user", "content": f"long text {number % 3} " * 200}])
        told = (await running.client.get("/advice")).json()
        assert [each["policy"] for each in told["policies"]] == specs
        assert {each["num_decisions"] for each in told["policies"]} == {20.0}
        assert len(told["sentences"]) == 3
        assert running.events("warmgate_shadow_decisions_total") == 60
        assert running.events("warmgate_shadow_failures_total") == 0
        assert running.events("warmgate_shadow_expected_ttft_seconds_total") > 0
        assert running.app.router.policy.name == make_policy("round_robin").name


async def test_without_shadows_advice_says_how_to_get_some() -> None:
    async with gateway(Replica()) as running:
        told = (await running.client.get("/advice")).json()
        assert "shadow_policies" in told["sentences"][0]


def test_the_command_says_where_it_found_nobody() -> None:
    result = CliRunner().invoke(cli, ["advise", "--url", "http://127.0.0.1:1"])
    assert result.exit_code != 0
    assert "is a gateway running there" in str(result.exception)
