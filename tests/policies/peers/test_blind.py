"""Rules that don't look at prefixes: chance, two choices, sessions."""

from __future__ import annotations

from collections import Counter

from policies.events import Left, Restarted, StatusChanged
from policies.types import ReplicaId, ReplicaStatus
from tests.policies.peers.support import Driven
from tests.policies.support import view


def test_random_takes_every_replica_about_equally() -> None:
    driven = Driven("random", "a", "b", "c", "d")
    counts = Counter(driven.ask("x").replica_id for _ in range(2000))
    assert len(counts) == 4
    assert min(counts.values()) > 400


def test_power_of_two_takes_the_lighter_of_two() -> None:
    driven = Driven("power_of_two", "a", "b")
    assert driven.choose("x", view("a", num_running=1), view("b", num_waiting=2)).replica_id == "a"
    three = (view("a", num_running=9), view("b", num_running=5), view("c", num_running=1))
    counts = Counter(driven.choose("x", *three).replica_id for _ in range(3000))
    # of the three pairs, c wins two and b wins one; a never wins
    assert counts.keys() == {"b", "c"}
    assert 1.7 < counts[ReplicaId("c")] / counts[ReplicaId("b")] < 2.3


def test_power_of_two_is_blind_to_prefixes() -> None:
    driven = Driven("power_of_two", "a", "b")
    assert driven.choose("x", view("a", matched_tokens=1000, num_running=2), view("b", num_running=1)).replica_id == "b"


def test_a_session_stays_where_it_began_however_busy_it_is_there() -> None:
    driven = Driven("sticky", "a", "b")
    home = driven.serve("x", session="s")
    for _ in range(50):
        driven.send("y", to=home)
    decision = driven.ask("x", session="s")
    assert (decision.replica_id, decision.reason) == (home, "session")
    assert driven.ask("x", session="new").replica_id != home
    assert driven.ask("x").reason == "load"


def test_a_session_moves_for_good_when_its_replica_cannot_take_it() -> None:
    driven = Driven("sticky", "a", "b")
    home = driven.serve("x", session="s")
    [other] = {ReplicaId("a"), ReplicaId("b")} - {home}
    driven.apply(StatusChanged(1.0, home, ReplicaStatus.DRAINING))
    assert driven.serve("x", 1.0, session="s") == other
    driven.apply(StatusChanged(2.0, home, ReplicaStatus.READY))
    assert driven.ask("x", 2.0, session="s").replica_id == other


def test_sessions_are_forgotten_with_their_process_and_when_there_are_too_many() -> None:
    driven = Driven("sticky:max_sessions=2", "a", "b")
    driven.send("x", to="a", session="s")
    driven.apply(Restarted(1.0, ReplicaId("a"), "two"))
    assert driven.ask("x", session="s").reason == "load"
    for session in ("s", "t", "u"):
        driven.send("x", to="b", session=session)
    assert driven.ask("x", session="s").reason == "load"
    assert driven.ask("x", session="t").reason == "session"
    driven.apply(Left(2.0, ReplicaId("b")))
    driven.policy.check_invariants()  # type: ignore[attr-defined]
