"""Many simulations at once: a process a core, one (policy, load, seed) at a time in each.

A process reads a trace once and keeps it, with the names of its prefixes, for all its runs.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.sim.bounds import Bounds, bounds
from loadtest.sim.figures import Figures, figures
from loadtest.sim.outputs import with_outputs
from loadtest.sim.pooled import NAME as POOLED
from loadtest.sim.pooled import PooledSimulation
from loadtest.sim.prompts import PromptBook
from loadtest.sim.series import Series, series
from loadtest.sim.setup import Setup
from loadtest.sim.simulation import Simulation
from loadtest.sim.trace import Trace, read_trace


@dataclass(frozen=True, slots=True)
class Task:
    """One run. `label` is carried through (the load it stands for)."""

    setup: Setup
    policy: str
    seed: int
    label: float = 0.0
    want_bounds: bool = False
    want_series: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    task: Task
    figures: Figures
    bounds: Bounds | None = None
    series: Series | None = None


Progress = Callable[[int, float], None]  # (index of the task, share of it done)

_traces: dict[tuple[Path, int | None, int | None, bool], tuple[Trace, PromptBook]] = {}
_told: Any = None  # the queue of this process's news


def run(task: Task, progress: Callable[[float], None] | None = None) -> Outcome:
    """In this process. Raises BadTrace, UnknownPolicy, ValueError."""
    setup = task.setup
    where = (setup.trace, setup.limit, setup.max_model_len, setup.reuse_outputs)
    if where not in _traces:
        _traces.clear()
        trace = read_trace(setup.trace, setup.limit, setup.max_model_len)
        _traces[where] = (with_outputs(trace) if setup.reuse_outputs else trace, PromptBook())
    trace, book = _traces[where]
    kind = PooledSimulation if task.policy == POOLED else Simulation
    simulation = kind(setup, trace, book, task.policy, task.seed)
    with _no_collector():
        simulation.run(progress)
    outcome = figures(simulation, task.policy, task.seed)
    limits = None
    if task.want_bounds:
        sent = [job.trace for job in simulation.jobs]
        limits = bounds(sent, book, sum(setup.fleet.num_blocks), trace.block_tokens)
    return Outcome(task, outcome, limits, series(simulation) if task.want_series else None)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """A run makes millions of objects and few cycles; walking all of them again and again takes a third of the time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_all(tasks: Sequence[Task], num_processes: int, progress: Progress | None = None) -> Iterator[Outcome]:
    """Outcomes as they come. The first failure is raised and ends the others."""
    if num_processes <= 1 or len(tasks) <= 1:
        for index, task in enumerate(tasks):
            told = _telling(index, progress) if progress is not None else None
            yield run(task, told)
            if progress is not None:
                progress(index, 1.0)
        return
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    with ProcessPoolExecutor(num_processes, context, _initialize, (news,)) as pool:
        try:
            futures = {pool.submit(_run_told, index, task): index for index, task in enumerate(tasks)}
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                _pass_on(news, progress)
                for future in done:
                    yield future.result()
                    if progress is not None:
                        progress(futures[future], 1.0)
        except BaseException:
            pool.shutdown(cancel_futures=True, wait=False)
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise


def _initialize(news: Any) -> None:
    """Of a pool's process, which would wait for ever for work from a parent that was killed."""
    global _told
    _told = news
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()


def _end_after(parent_ends: Callable[[], None]) -> None:
    parent_ends()
    os._exit(1)


def _run_told(index: int, task: Task) -> Outcome:
    return run(task, lambda share: _told.put((index, share)))


def _telling(index: int, progress: Progress) -> Callable[[float], None]:
    return lambda share: progress(index, share)


def _pass_on(news: Any, progress: Progress | None) -> None:
    while True:
        try:
            index, share = news.get_nowait()
        except queue.Empty:
            return
        if progress is not None:
            progress(index, share)
