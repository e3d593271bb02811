"""Scheduler and runner in one process, as the engine loop drives them, with times."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_worker.config import EngineConfig
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.core.types import Request, SamplingParams, StepPlan
from engine_worker.model.load import load_model
from engine_worker.model.runner import LaunchedStep, ModelRunner
from engine_worker.serving.speculate import Speculator


@dataclass
class Run:
    """What one batch of requests gave. `steps` are (tokens, requests, seconds) of each step; times in seconds."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_ahead: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def decode_step_s(self, batch: int) -> float:
        """The median time of a step in which `batch` requests decode."""
        times = sorted(seconds for tokens, requests, seconds in self.steps[1:] if tokens == requests == batch)
        return times[len(times) // 2] if times else float("nan")

    def decode_s(self) -> float:
        """From the last request's first token to the end."""
        return sum(seconds for _, _, seconds in self.steps) - max(self.first_s.values())


class Engine:
    """A runner and a scheduler of its own."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.runner = runner
        info = runner.info
        partial = config.partial_hits != "off"  # also where it isn't the default: what can be asked for is checked
        self.kv = KVCacheManager(info.num_blocks, info.block_size, info.cache_root, enable_partial_hits=partial)
        limits = SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens, info.max_model_len, frozenset())
        self.scheduler = Scheduler(limits, self.kv)
        self._num_requests = 0
        self._speculator: Speculator | None = None
        if runner.drafter is not None:
            most, always = config.num_speculative_tokens, config.always_speculate
            self._speculator = Speculator(self.scheduler, runner.drafter, most, always)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        ahead: bool = False,
        speculate: bool = False,
    ) -> Run:
        """Answers to all prompts, submitted together. Tokens are listed under "0", "1", ..."""
        assert not (ahead and speculate), "guesses go on from tokens that must be known"
        speculator = self._speculator if speculate else None
        assert speculator is not None or not speculate, "the engine was loaded without speculation"
        run, scheduler = Run(), self.scheduler
        names: dict[str, str] = {}
        for index, prompt in enumerate(prompts):
            name = f"request-{self._num_requests}"
            self._num_requests += 1
            names[name] = str(index)
            run.tokens[str(index)] = []
            scheduler.add(Request(request_id=name, prompt_ids=tuple(prompt), params=params, arrival_s=0.0))
        begin = last = time.perf_counter()
        waiting: tuple[StepPlan, LaunchedStep] | None = None
        while scheduler.has_work() or waiting is not None:
            if speculator is not None:
                speculator.before_plan()
            plan, launched = waiting or self._launch(scheduler.plan(0.0), ahead)
            behind = scheduler.plan_ahead(plan) if ahead else None
            waiting = None if behind is None else self._launch(behind, ahead)
            run.num_ahead += behind is not None
            result = launched.result()
            now = time.perf_counter()
            run.steps.append((plan.num_tokens, len(plan.segments), now - last))
            if speculator is not None:
                speculator.before_commit(plan, now - last)
            last = now
            for update in scheduler.commit(plan, result):
                index_ = names[update.request_id]
                run.num_cached_tokens += update.num_cached_tokens if index_ not in run.first_s else 0
                if update.token is not None:
                    run.first_s.setdefault(index_, now - begin)
                    run.tokens[index_].append(update.token.token_id)
                if update.error:
                    run.errors.append(update.error)
                if update.finish_reason is not None:
                    self._release(update.request_id)
                    run.num_draft_tokens += update.num_draft_tokens
                    run.num_accepted_tokens += update.num_accepted_tokens
            if speculator is not None:
                speculator.after_commit()
            scheduler.take_events()
        return run

    def _release(self, request_id: str) -> None:
        self.runner.release(request_id)
        if self._speculator is not None:
            self._speculator.release(request_id)

    def _launch(self, plan: StepPlan, ahead: bool) -> tuple[StepPlan, LaunchedStep]:
        return plan, self.runner.launch(plan) if ahead else LaunchedStep(self.runner.execute(plan), None)


def write_config(folder: Path, **values: Any) -> Path:
    """A folder with a config.json and nothing else: what load_format dummy needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def load(folder: Path, device: str, **settings: Any) -> tuple[Engine, EngineConfig]:
    config = EngineConfig(model=str(folder), device=device, load_format="dummy", **settings)
    runner = load_model(config, lambda line: print(f"    {line}", flush=True))
    return Engine(runner, config), config
