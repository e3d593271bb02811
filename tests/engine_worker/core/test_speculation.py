"""Speculated tokens in the scheduling rule: what is taken, what is dropped, and what it may cost others."""

from __future__ import annotations

import pytest

from engine_worker.core.events import BlocksStored
from engine_worker.core.types import FinishReason, Request, SampledToken, StepResult
from tests.engine_worker.core.fake_runner import Driver, make_driver, make_request, next_token, shape


def decoding(driver: Driver, request: Request) -> Request:
    """The request behind its first token."""
    driver.add(request)
    driver.step()
    return request


def truth(driver: Driver, request: Request, count: int) -> tuple[int, ...]:
    """What the model will say next."""
    history = [*request.prompt_ids, *request.output_ids]
    for _ in range(count):
        history.append(next_token(history, driver.runner.vocab_size))
    return tuple(history[-count:])


def wrong(token_id: int) -> int:
    return (token_id + 1) % 50


def test_right_guesses_become_output_with_the_token_behind_them() -> None:
    driver = make_driver()
    request = decoding(driver, make_request("a", range(6), 20))
    driver.scheduler.speculate(request, truth(driver, request, 4))
    assert request.num_tokens == 6 + 1 + 4
    assert shape(driver.step()) == [("a", 6, 11, True)]
    assert len(request.output_ids) == 1 + 4 + 1
    assert request.num_computed == request.num_tokens - 1 == 11
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (4, 4)
    driver.run()
    driver.check_ended()


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_wrong_guess_ends_what_is_taken_and_moves_the_counter_back(num_right: int) -> None:
    driver = make_driver()
    request = decoding(driver, make_request("a", range(6), 20))
    guesses = truth(driver, request, 3)
    spoilt = (*guesses[:num_right], wrong(guesses[num_right]), *guesses[num_right + 1 :])
    driver.scheduler.speculate(request, spoilt)
    driver.step()
    assert request.num_computed == 6 + 1 + num_right == request.num_tokens - 1
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, num_right)
    driver.run()
    driver.check_ended()


def test_the_first_guess_is_not_taken_on_trust() -> None:
    driver = make_driver()
    request = decoding(driver, make_request("a", range(6), 20))
    driver.scheduler.speculate(request, (wrong(truth(driver, request, 1)[0]),))
    plan = driver.scheduler.plan(0.0)
    cheat = StepResult({"a": SampledToken(1)}, following={"a": (SampledToken(2),)})
    with pytest.raises(AssertionError, match="unverified"):
        driver.scheduler.commit(plan, cheat)


def test_blocks_are_named_after_tokens_that_stay() -> None:
    """Wrong guesses fill two blocks of 4; neither may be announced or hit."""
    driver = make_driver(block_size=4)
    request = decoding(driver, make_request("a", range(7), 30))
    guess = wrong(truth(driver, request, 1)[0])
    driver.scheduler.speculate(request, (guess,) * 9)
    plan = driver.scheduler.plan(0.0)
    driver.scheduler.commit(plan, driver.runner.execute(plan))
    stored = [event for event in driver.scheduler.take_events() if isinstance(event, BlocksStored)]
    assert [event.token_ids for event in stored] == [(*request.prompt_ids[4:], request.output_ids[0])]


def test_no_guess_goes_beyond_an_end_or_a_limit() -> None:
    driver = make_driver(max_model_len=14, eos=frozenset({49}))
    request = decoding(driver, make_request("a", range(6), 5, stop_token_ids=(48,)))
    assert driver.scheduler.can_speculate(10) == [(request, 3)]  # 4 of 5 tokens are left, the last follows the guesses
    driver.scheduler.speculate(request, (1, 49, 2))
    assert request.draft_ids == (1,)
    driver.step()
    driver.scheduler.speculate(request, (48, 2))
    assert request.draft_ids == ()
    driver.run()
    driver.check_ended()
    other = decoding(driver, make_request("b", range(9), 100))
    assert driver.scheduler.can_speculate(10) == [(other, 3)]  # 10 of 14 tokens are there


def test_what_follows_a_stop_in_mid_guess_is_dropped() -> None:
    """A sampler that went on behind the token that ends the sequence."""
    driver = make_driver()
    request = decoding(driver, make_request("a", range(6), 20))
    first, second = truth(driver, request, 2)
    driver.scheduler.speculate(request, (first, second))
    request.params = make_request("x", [1], 20, stop_token_ids=(first,)).params  # as if it had slipped through
    plan = driver.scheduler.plan(0.0)
    updates = driver.scheduler.commit(plan, driver.runner.execute(plan))
    assert [(u.token and u.token.token_id, u.finish_reason) for u in updates] == [(first, FinishReason.STOP)]
    driver.scheduler.check_invariants()


def test_each_token_tells_the_right_guesses_up_to_itself() -> None:
    """A stop string may end the answer at any token of a step: guesses behind it did not become output."""
    driver = make_driver()
    request = decoding(driver, make_request("a", range(6), 20))
    driver.scheduler.speculate(request, truth(driver, request, 3))
    plan = driver.scheduler.plan(0.0)
    updates = driver.scheduler.commit(plan, driver.runner.execute(plan))
    assert [update.num_accepted_tokens for update in updates] == [1, 2, 3, 3]
    assert [update.num_draft_tokens for update in updates] == [3] * 4


def test_guesses_leave_the_budget_to_others() -> None:
    """Of 8 tokens two go to decodes and one is kept for the prompt that waits."""
    driver = make_driver(max_num_batched_tokens=8)
    first = decoding(driver, make_request("a", range(4), 20))
    second = decoding(driver, make_request("b", range(3), 20))
    driver.scheduler.speculate(first, truth(driver, first, 4))
    driver.scheduler.speculate(second, truth(driver, second, 4))
    driver.add(make_request("c", range(20), 1))
    plan = driver.step()
    assert [len(segment.token_ids) for segment in plan.segments] == [5, 2, 1]
    driver.run()
    driver.check_ended()


def test_guesses_take_no_block_that_others_need() -> None:
    """Two running requests and 4 blocks: what is left after one for each of them is too little for the guesses."""
    driver = make_driver(num_blocks=4, block_size=4)
    first = decoding(driver, make_request("a", range(3), 9))
    decoding(driver, make_request("b", range(3), 9, arrival_s=1.0))
    driver.scheduler.speculate(first, (1,) * 6)
    assert len(first.draft_ids) == 0
    assert driver.scheduler.reserve(first, 6) == 0
    driver.run()
    driver.check_ended()


def test_a_cancelled_request_takes_its_guesses_along() -> None:
    driver = make_driver()
    request = decoding(driver, make_request("a", range(6), 20))
    driver.scheduler.speculate(request, truth(driver, request, 4))
    driver.step(cancel_meanwhile=["a"])
    driver.check_ended()
    assert request.draft_ids == ()
