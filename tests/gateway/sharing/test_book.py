"""The book by tables: sequences, gaps, leases that end with their gateway, blocks through a peer. No Redis or clock."""

from __future__ import annotations

import pytest

from gateway.sharing import wire
from gateway.sharing.book import PEER_TTL_S, Book
from gateway.sharing.outbox import LISTED_KEY_BYTES, MAX_PENDING, Outbox
from policies.events import BlocksCleared, BlocksStored, Dispatched, Event, Failed, FailureKind, FeedLost, Finished
from policies.events import FirstToken as First
from policies.fleet import FleetState
from policies.types import BlockKey, PrefixChain, ReplicaId
from tests.policies.support import SPACE, chain, joined, keys, matched_blocks

A, B = ReplicaId("a"), ReplicaId("b")


class Here:
    """A gateway with replicas `a` and `b`, in incarnation "one"."""

    def __init__(self) -> None:
        self.fleet = FleetState()
        self.events: list[Event] = []
        self.lacks: list[ReplicaId] = []
        for name in "ab":
            self.fleet.apply(joined(name))

    def apply(self, event: Event) -> None:
        self.events.append(event)
        self.fleet.apply(event)

    def matches(self, replica_id: ReplicaId, incarnation: str, space: str) -> bool:
        return replica_id in self.fleet.replica_ids() and incarnation == "one" and space == SPACE

    def has_lease(self, request_id: str) -> bool:
        return self.fleet.has_lease(request_id)

    def lacking(self) -> list[ReplicaId]:
        return self.lacks


def dispatch(request_id: str, path: str = "xy", replica: str = "a", incarnation: str = "one", **more: object):
    prompt = chain(path)
    packed = wire.pack_keys(prompt.keys)
    return wire.Dispatch(
        0.0, request_id, replica, incarnation, SPACE, packed, prompt.block_tokens, prompt.num_tokens, 0, True, **more
    )  # type: ignore[arg-type]


def said(sequence: int, *items: wire.Item, sender: str = "peer") -> wire.Message:
    return wire.decode(wire.encode(sender, sequence, list(items)))


@pytest.fixture
def here() -> Here:
    return Here()


@pytest.fixture
def book(here: Here) -> Book:
    return Book("us", here)


def waiting(here: Here, name: str = "a") -> int:
    return here.fleet.stats(ReplicaId(name)).num_waiting


def test_a_peers_request_is_load_and_prefix_here(here: Here, book: Book) -> None:
    book.receive(said(1, dispatch("1")), 1.0)
    assert waiting(here) == 1
    book.receive(said(2, wire.First(0.1, "1", "a", 0)), 1.5)
    book.receive(said(3, wire.Finish(0.0, "1", "a", 5, 0, 35)), 2.0)
    assert (waiting(here), here.fleet.num_leases(), book.num_leases) == (0, 0, 0)
    assert matched_blocks(here.fleet, "xy")["a"] > 0
    assert [type(event) for event in here.events] == [Dispatched, First, Finished]
    assert here.events[1].at == pytest.approx(1.4), "ages count from our own clock"
    book.check_invariants()


def test_what_is_about_another_process_cut_or_replica_is_passed_over(here: Here, book: Book) -> None:
    items = [dispatch("1", incarnation="two"), dispatch("2", replica="c")]
    book.receive(said(1, *items, wire.First(0.0, "1", "a", 0), wire.Fail(0.0, "2", "c", "broken")), 1.0)
    assert here.fleet.num_leases() == book.num_leases == 0


@pytest.mark.parametrize(
    "later",
    [
        [wire.Finish(0.0, "1", "b", 5, 0, 35)],
        [wire.Fail(0.0, "1", "b", "broken")],
        [dispatch("1", replica="b"), wire.Finish(0.0, "1", "b", 5, 0, 35)],
        [dispatch("1", replica="b", incarnation="two")],
        [wire.Leases([dispatch("1", replica="b")]), wire.Leases([])],
    ],
)
def test_a_request_that_moved_on_unheard_leaves_nothing_where_it_was(here: Here, book: Book, later) -> None:
    book.receive(said(1, dispatch("1")), 1.0)
    book.receive(said(3, *later), 2.0)  # message 2 told that it failed at `a` and went to `b`
    book.check_invariants()
    assert (waiting(here), waiting(here, "b"), here.fleet.num_leases(), book.num_leases) == (0, 0, 0, 0)


def test_a_number_seen_before_is_skipped(here: Here, book: Book) -> None:
    book.receive(said(1, dispatch("1")), 1.0)
    book.receive(said(1, dispatch("2")), 1.0)
    assert here.fleet.num_leases() == 1
    assert book.num_gaps == 0


def test_a_gap_asks_for_all_leases_and_the_list_makes_it_good(here: Here, book: Book) -> None:
    book.receive(said(1, dispatch("lost-end"), dispatch("stays")), 1.0)
    book.receive(said(3), 1.1)
    assert book.num_gaps == 1
    assert book.tick(1.2, []).asks_leases == ["peer"]
    assert book.tick(1.3, []).asks_leases == [], "not at every beat"
    book.receive(said(4, wire.Leases([dispatch("stays"), dispatch("lost-begin", first_age_s=0.5)])), 1.4)
    assert sorted(book.peers["peer"].leases) == ["peer:lost-begin", "peer:stays"]
    assert here.fleet.num_leases() == 2
    assert here.fleet.stats(A).num_running == 1, "its first token has come"
    assert book.tick(9.0, []).asks_leases == []
    here.fleet.check_invariants()


def test_a_newcomer_asks_who_was_there_before(book: Book) -> None:
    book.receive(said(17), 1.0)
    assert book.tick(1.0, []).asks_leases == ["peer"]


def test_a_silent_gateways_leases_are_over_within_seconds(here: Here, book: Book) -> None:
    book.receive(said(1, dispatch("1"), dispatch("2", replica="b")), 1.0)
    book.tick(1.0 + PEER_TTL_S - 0.1, [])
    assert here.fleet.num_leases() == 2
    book.tick(1.0 + PEER_TTL_S + 0.1, [])
    assert here.fleet.num_leases() == book.num_leases == len(book.peers) == 0
    assert {event.kind for event in here.events if isinstance(event, Failed)} == {FailureKind.CANCELLED}


def test_a_gateway_that_says_goodbye_is_forgotten_at_once(here: Here, book: Book) -> None:
    book.receive(said(1, dispatch("1")), 1.0)
    book.receive(said(2, wire.Bye()), 1.1)
    assert here.fleet.num_leases() == len(book.peers) == 0


def test_leases_purged_with_a_restart_here_end_quietly(here: Here, book: Book) -> None:
    book.receive(said(1, dispatch("1")), 1.0)
    here.fleet.apply(joined("a", at=1.1, incarnation="two"))
    book.receive(said(2, wire.Fail(0.0, "1", "a", "broken")), 1.2)
    assert here.fleet.num_leases() == book.num_leases == 0
    here.fleet.check_invariants()


def test_the_same_request_ids_of_two_gateways_do_not_collide(here: Here, book: Book) -> None:
    for sender in ("p", "q"):
        book.receive(said(1, dispatch("1"), sender=sender), 1.0)
    assert here.fleet.num_leases() == 2


def test_the_least_id_alive_is_the_first(book: Book) -> None:
    assert book.is_first()
    book.receive(said(1, sender="zz"), 1.0)
    assert book.is_first()
    book.receive(said(1, sender="aa"), 1.0)
    assert not book.is_first()
    book.receive(said(2, wire.Beat([], [], asks_index=True), sender="aa"), 1.0)
    assert book.is_first(), "a newcomer has nothing to tell yet"


def test_blocks_that_only_a_peer_hears_are_followed_through_it(here: Here, book: Book) -> None:
    here.lacks = [A]
    xy, xz = wire.pack_keys(keys("xy")), wire.pack_keys(keys("xz")[1:])
    blocks = [wire.Blocks("a", "one", SPACE, "cleared"), wire.Blocks("a", "one", SPACE, "stored", xy)]
    book.receive(said(1, wire.Beat(["a"], []), *blocks), 1.0)
    assert not here.events, "nobody asked for them"
    assert book.tick(1.0, []).asks_blocks == [("peer", "a")]
    book.receive(said(2, *blocks), 1.1)
    assert here.fleet.stats(A).num_index_blocks == 2
    assert here.fleet.stats(A).authoritative
    book.receive(said(3, wire.Blocks("a", "one", SPACE, "stored", xz)), 1.2)
    assert here.fleet.stats(A).num_index_blocks == 3
    book.receive(said(4, wire.Blocks("a", "one", SPACE, "removed", xz)), 1.3)
    assert here.fleet.stats(A).num_index_blocks == 2
    assert book.tick(1.4, []).asks_blocks == []
    book.receive(said(6), 1.5)
    assert isinstance(here.events[-1], FeedLost), "a gap"
    assert not here.fleet.stats(A).authoritative
    assert book.tick(3.0, []).asks_blocks == [("peer", "a")], "and again"


def test_our_own_feed_wins_over_a_peers(here: Here, book: Book) -> None:
    here.lacks = [A]
    book.receive(said(1, wire.Beat(["a"], [])), 1.0)
    book.tick(1.0, [])
    book.receive(said(2, wire.Blocks("a", "one", SPACE, "cleared")), 1.1)
    assert book.follows("a")
    book.heard_here(A)
    here.lacks = []
    before = len(here.events)
    book.receive(said(3, wire.Blocks("a", "one", SPACE, "stored", wire.pack_keys(keys("x")))), 1.2)
    book.receive(said(9), 1.3)
    assert len(here.events) == before


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        wire.encode("g", 1, [])[:-1],
        wire._encoder.encode(wire.Message(99, "g", 1, [])),
        wire._encoder.encode([1, "", 1, []]),
        wire._encoder.encode([1, "g", -1, []]),
        wire._encoder.encode([1, "g", 1, [["d", -1.0]]]),
        wire._encoder.encode([1, "g", 1, [["?"]]]),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


def test_keys_keep_all_their_bits() -> None:
    some = tuple(BlockKey(n) for n in (0, 1, 2**64 - 1, 2**64, 2**128 - 1))
    assert wire.unpack_keys(wire.pack_keys(some)) == some
    with pytest.raises(wire.WireError):
        wire.unpack_keys(b"x" * 17)


def event(number: int, path: str = "xy") -> Dispatched:
    return Dispatched(1.0, A, str(number), chain(path), 0)


def test_the_outbox_keeps_only_leases_while_redis_is_down() -> None:
    box = Outbox(lambda _: ("one", SPACE))
    assert not box.add(event(1), is_up=False)
    assert not box.add(event(2), is_up=False)
    assert not box.add(Finished(2.0, A, "1", 5), is_up=False)
    assert (len(box), list(box.leases)) == (0, ["2"])
    [listed] = box.take(3.0)
    assert isinstance(listed, wire.Leases)
    assert [lease.request_id for lease in listed.leases] == ["2"]
    assert listed.leases[0].age_s == 2.0
    assert box.take(3.0) == []


def test_the_outbox_is_bounded() -> None:
    box = Outbox(lambda _: ("one", SPACE))
    for number in range(MAX_PENDING + 5):
        box.add(First(1.0, A, str(number)), is_up=True)
    assert len(box) == 5
    assert box.num_dropped == MAX_PENDING
    assert any(isinstance(item, wire.Leases) for item in box.take(2.0))


def test_a_long_list_of_leases_leaves_blocks_out() -> None:
    box = Outbox(lambda _: ("one", SPACE))
    long = PrefixChain(tuple(map(BlockKey, range(30_000))), 16, 480_000)
    for number in range(4):
        box.add(Dispatched(1.0, A, str(number), long, 0), is_up=False)
    [listed] = box.take(2.0)
    assert isinstance(listed, wire.Leases)
    assert [bool(lease.keys) for lease in listed.leases] == [True, True, True, False]
    assert sum(len(lease.keys) for lease in listed.leases) < 2 * LISTED_KEY_BYTES
    assert {lease.num_tokens for lease in listed.leases} == {480_000}


def test_all_blocks_of_a_replica_rebuild_the_same_picture(here: Here, book: Book) -> None:
    there = FleetState()
    there.apply(joined("a"))
    there.apply(BlocksCleared(0.0, A))
    for path in ("wxyz", "wxab", "q"):
        there.apply(BlocksStored(0.5, A, keys(path)))
    box = Outbox(lambda _: ("one", SPACE))
    box.add_blocks(A, there.index.holds(A))
    here.lacks = [A]
    book.receive(said(1, wire.Beat(["a"], [])), 1.0)
    book.tick(1.0, [])
    book.receive(said(2, *box.take(1.0)), 1.1)
    for path in ("wxyz", "wxab", "q", "wq"):
        assert matched_blocks(here.fleet, path) == {"b": 0, **matched_blocks(there, path)}
    here.fleet.check_invariants()
