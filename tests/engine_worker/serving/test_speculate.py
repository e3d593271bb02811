"""The engine's loop with a drafter: right guesses save steps, a drafter that fails costs nothing but guesses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_worker.core.types import Request
from engine_worker.serving import speculate
from engine_worker.serving.speculate import Speculator
from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request, next_token


class Oracle:
    """Knows what the fake model will say. With `needs_slots` it checks that it has them."""

    name = "oracle"

    def __init__(self, driver: Driver, needs_slots: bool) -> None:
        self.driver = driver
        self.needs_slots = needs_slots
        self.num_calls = 0
        self.released: list[str] = []

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]:
        self.num_calls += 1
        return [self._guess(request, most) for request, most in wanted]

    def _guess(self, request: Request, most: int) -> tuple[int, ...]:
        if self.needs_slots:
            assert len(request.block_ids) * 4 >= request.num_tokens + most
        history = [*request.prompt_ids, *request.output_ids]
        for _ in range(most):
            history.append(next_token(history, self.driver.runner.vocab_size))
        return tuple(history[len(history) - most :])

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class Broken(Oracle):
    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[tuple[int, ...]]:
        self.num_calls += 1
        raise MemoryError("no room for a draft")


def run(driver: Driver, speculator: Speculator) -> int:
    """To the end; a step costs as long as the weights take and hardly more for each token. Returns the steps."""
    num_steps = 0
    while driver.scheduler.has_work():
        speculator.before_plan()
        plan = driver.scheduler.plan(float(num_steps))
        speculator.before_commit(plan, 1.0 + 0.01 * plan.num_tokens)
        for segment in plan.segments:
            driver.first_starts.setdefault(segment.request.request_id, segment.start)
        for update in driver.scheduler.commit(plan, driver.runner.execute(plan)):
            driver._note(update)
        speculator.after_commit()
        for request_id in list(driver.ends):
            speculator.release(request_id)
        driver.check()
        num_steps += 1
    driver.check_ended()
    speculator.check_idle()
    return num_steps


@pytest.mark.parametrize("needs_slots", [False, True])
def test_right_guesses_save_steps_and_change_no_answer(needs_slots: bool) -> None:
    driver = make_driver()
    driver.add(*(make_request(f"r{i}", range(i + 3), 60, arrival_s=float(i)) for i in range(3)))
    oracle = Oracle(driver, needs_slots)
    speculator = Speculator(driver.scheduler, oracle, 6)
    assert run(driver, speculator) < 30
    assert speculator.is_on
    assert set(oracle.released) == {"r0", "r1", "r2"}
    stats = driver.scheduler.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 100


def test_a_drafter_that_keeps_failing_is_left_alone() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), 40))
    broken = Broken(driver, needs_slots=True)
    speculator = Speculator(driver.scheduler, broken, 6)
    assert run(driver, speculator) == 40
    assert broken.num_calls == speculate._MAX_FAILURES
    assert not speculator.is_on
