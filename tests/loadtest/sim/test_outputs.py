"""Answers that come back in later prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loadtest.sim.gpus import GPUS
from loadtest.sim.outputs import with_outputs
from loadtest.sim.prompts import PromptBook
from loadtest.sim.setup import Fleet, Load, Setup
from loadtest.sim.simulation import Simulation
from loadtest.sim.trace import Trace
from tests.loadtest.sim.traces import request, timed

TURN = request(1, 2, tail=10, output=1100)  # fills blocks 2 and 3: 10 + 1100 - 1 tokens behind 1024
NEXT = request(1, 2, 3, 4, 5, tail=7, at_s=60.0)


def outputs(*requests: object) -> list[tuple[int, ...]]:
    found = with_outputs(timed(*requests))  # type: ignore[arg-type]
    return [each.output_block_ids for each in found.requests()]


def test_the_next_turn_names_the_answer() -> None:
    assert outputs(TURN, NEXT) == [(3, 4), ()]
    assert outputs(TURN, NEXT, replace(NEXT, block_ids=(1, 2, 8, 9, 9), at_s=70.0)) == [(3, 4), (), ()]


def test_no_turn_no_name() -> None:
    assert outputs(TURN, request(1, 2, 3, 4, tail=3, at_s=60.0)) == [(), ()], "too short for prompt and answer"
    assert outputs(TURN, request(1, 7, 3, 4, 5, at_s=60.0)) == [(), ()], "another prefix"
    assert outputs(request(1, output=600), request(1, 2, 3, 4, at_s=60.0)) == [(), ()], "one block says too little"


def cached(trace: Trace) -> list[int]:
    setup = Setup(Path("none"), Fleet((GPUS["h100"],), (60,)), Load())
    run = Simulation(setup, trace, PromptBook(), "warm", 1)
    run.run()
    return [job.cached_tokens for job in run.jobs]


def test_the_next_turn_hits_the_answer() -> None:
    trace = timed(TURN, NEXT)
    assert cached(trace) == [0, 1024]
    assert cached(with_outputs(trace)) == [0, 2048]
