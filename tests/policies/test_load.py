"""ReplicaLoad: which first tokens make one observation of the engine's speed."""

from __future__ import annotations

import pytest

from policies.cost import SpeedModel
from policies.lease import Lease
from policies.load import ReplicaLoad
from policies.types import ReplicaId
from tests.policies.support import chain


class Recorder(SpeedModel):
    """A speed model that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.prefills: list[tuple[int, int, float]] = []
        self.decodes: list[tuple[int, float, float]] = []

    def observe_prefill(self, num_requests: int, num_uncached: int, num_attended: float, seconds: float) -> None:
        self.prefills.append((num_requests, num_uncached, pytest.approx(seconds)))

    def observe_decode(self, num_output_tokens: int, seconds: float, kv_tokens: float) -> None:
        self.decodes.append((num_output_tokens, pytest.approx(seconds), kv_tokens))


@pytest.fixture
def speed() -> Recorder:
    return Recorder()


@pytest.fixture
def load(speed: Recorder) -> ReplicaLoad:
    return ReplicaLoad(speed)


def lease(load: ReplicaLoad, rid: str, at: float, num_blocks: int = 10, streamed: bool = True) -> Lease:
    prompt = chain("x" * num_blocks, tail_tokens=0)
    taken = Lease(rid, ReplicaId("a"), prompt, 0, 0, 0, 1.0, at, streamed=streamed)
    load.dispatched(taken)
    return taken


def test_a_lone_request_is_one_observation_of_its_uncached_tokens(load: ReplicaLoad, speed: Recorder) -> None:
    alone = lease(load, "r", 10.0)
    assert load.first_token(alone, 10.5, cached_tokens=64)
    assert speed.prefills == [(1, 160 - 64, 0.5)]
    load.ended(alone, 12.5, num_output_tokens=101)
    assert speed.decodes == [(101, 2.0, 160.0)]


def test_a_queue_is_observed_from_first_token_to_first_token(load: ReplicaLoad, speed: Recorder) -> None:
    leases = [lease(load, f"r{i}", 10.0) for i in range(3)]
    for i, taken in enumerate(leases):
        load.first_token(taken, 11.0 + i, 0)
    assert speed.prefills == [(1, 160, 1.0)] * 3


def test_first_tokens_of_one_step_are_one_observation(load: ReplicaLoad, speed: Recorder) -> None:
    leases = [lease(load, f"r{i}", 10.0) for i in range(3)]
    for i, taken in enumerate(leases):
        load.first_token(taken, 12.0 + 0.001 * i, 0)
    assert speed.prefills == [(3, 480, 2.002)]


def test_an_unstreamed_request_before_it_belongs_to_its_step(load: ReplicaLoad, speed: Recorder) -> None:
    silent = lease(load, "s", 10.0, streamed=False)
    load.first_token(lease(load, "r", 10.0), 10.8, 0)
    assert speed.prefills == [(2, 320, 0.8)]
    assert silent.request_id in load.running
    assert not load.ended(silent, 50.0, num_output_tokens=100)
    assert not speed.decodes


def test_nothing_is_learned_while_others_prompts_are_in_the_way(load: ReplicaLoad, speed: Recorder) -> None:
    from policies.events import StatsReported

    taken = lease(load, "r", 10.0)
    load.reported(StatsReported(10.1, ReplicaId("a"), 0, 5, 0.0, 5000), SpeedModel().own_rates())
    assert not load.first_token(taken, 12.0, 0)
    assert not speed.prefills


def test_one_that_was_overtaken_teaches_nothing(load: ReplicaLoad, speed: Recorder) -> None:
    first, second, third = (lease(load, f"r{i}", 10.0) for i in range(3))
    load.first_token(second, 11.0, 0)
    load.first_token(first, 11.3, 0)  # much of it was done before 11.0
    load.first_token(third, 12.3, 0)
    assert speed.prefills == [(1, 160, 1.0), (1, 160, 1.0)]


def test_a_long_prompt_and_those_it_was_interrupted_for_are_one_observation(speed: Recorder) -> None:
    load = ReplicaLoad(speed, step_tokens=32)
    long = lease(load, "long", 10.0)
    shorts = [Lease(f"s{i}", ReplicaId("a"), chain("x", tail_tokens=0), 0, 0, 0, 0.1, 10.3 + i / 10) for i in range(2)]
    for short in shorts:
        load.dispatched(short)
    load.first_token(shorts[0], 10.5, 0)
    load.first_token(shorts[1], 11.0, 0)  # much later than a step's tokens come apart
    assert not speed.prefills
    assert load.first_token(long, 11.5, 0)
    assert speed.prefills == [(3, 160 + 16 + 16, 1.5)]  # since the long one began
    load.check_invariants()


def test_an_interrupted_prompt_that_is_given_up_takes_the_time_with_it(speed: Recorder) -> None:
    load = ReplicaLoad(speed, step_tokens=32)
    long = lease(load, "long", 10.0)
    short = Lease("short", ReplicaId("a"), chain("x", tail_tokens=0), 0, 0, 0, 0.1, 10.3)
    load.dispatched(short)
    load.first_token(short, 10.5, 0)
    load.ended(long, 11.0)
    after = lease(load, "after", 12.0)
    load.first_token(after, 13.0, 0)
    assert speed.prefills == [(1, 160, 1.0)]


def test_one_that_is_behind_in_the_line_was_not_overtaken(speed: Recorder) -> None:
    load = ReplicaLoad(speed, step_tokens=320)
    lease(load, "head", 10.0)
    long = Lease("long", ReplicaId("a"), chain("x" * 20, tail_tokens=0), 0, 0, 0, 2.0, 10.1)
    load.dispatched(long)
    load.first_token(load.waiting["head"], 11.0, 0)
    load.first_token(long, 13.0, 0)
    assert speed.prefills == [(1, 160, 1.0), (1, 320, 2.0)]
