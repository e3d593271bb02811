"""How requests end early or never begin: cancelled at any moment, failed alone, refused."""

from __future__ import annotations

import pytest

from engine_worker.core.scheduler import RequestTooLarge, SchedulerConfig
from engine_worker.core.types import FinishReason, RequestStatus
from tests.engine_worker.core.fake_runner import make_driver, make_request, shape

# -- cancellation and failure


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_cancelled_request_leaves_nothing_and_disturbs_nobody(steps_before: int, meanwhile: bool) -> None:
    """In the queue, in prefill, in decode; before a plan and between plan and commit."""
    driver = make_driver(max_num_batched_tokens=6)
    driver.add(make_request("keep", range(8), max_tokens=9), make_request("drop", range(8), max_tokens=9))
    for _ in range(steps_before):
        driver.step()
    if meanwhile:
        driver.step(cancel_meanwhile=["drop"])
    else:
        assert driver.cancel("drop")
    num_seen = len(driver.outputs["drop"])
    assert driver.requests["drop"].status is RequestStatus.FINISHED
    driver.run()
    assert len(driver.outputs["drop"]) == num_seen
    driver.check_ended()


def test_cancelling_the_unknown_or_finished_is_no_error() -> None:
    driver = make_driver()
    driver.add(make_request("a", [1]))
    driver.run()
    assert not driver.scheduler.cancel("a")
    assert not driver.scheduler.cancel("never was")


def test_an_id_may_be_used_again_while_the_old_result_is_on_its_way() -> None:
    driver = make_driver()
    driver.add(make_request("a", range(5), max_tokens=3))
    plan = driver.scheduler.plan(0.0)
    result = driver.runner.execute(plan)
    driver.scheduler.cancel("a")
    driver.add(make_request("a", range(30, 35), max_tokens=3))
    assert driver.scheduler.commit(plan, result) == []
    driver.first_starts.clear()
    driver.run()
    driver.check_ended()


def test_abandoned_requests_cost_the_next_one_nothing() -> None:
    driver = make_driver(max_num_seqs=2, max_num_batched_tokens=8)
    driver.add(*(make_request(str(i), range(i, i + 40), max_tokens=99, arrival_s=i) for i in range(6)))
    driver.step()
    for i in range(6):
        driver.cancel(str(i))
    driver.add(make_request("next", range(70, 77), arrival_s=9.0))
    assert shape(driver.step()) == [("next", 0, 7, True)]


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_request_that_fails_alone_ends_alone(steps_before: int) -> None:
    driver = make_driver(max_num_batched_tokens=6)
    driver.add(make_request("good", range(8), max_tokens=5), make_request("bad", range(9), max_tokens=5))
    for _ in range(steps_before):
        driver.step()
    driver.runner.fail.add("bad")
    driver.run()
    assert driver.ends == {"good": FinishReason.LENGTH, "bad": FinishReason.ERROR}
    driver.check_ended()


def test_the_sentence_of_a_failure_reaches_whoever_waits() -> None:
    driver = make_driver()
    driver.add(make_request("bad", range(9)))
    driver.runner.fail.add("bad")
    plan = driver.scheduler.plan(0.0)
    (update,) = driver.scheduler.commit(plan, driver.runner.execute(plan))
    assert (update.finish_reason, update.token, update.error) == (FinishReason.ERROR, None, "it failed")


# -- refusals


def test_a_prompt_beyond_the_model_is_refused_with_the_numbers() -> None:
    driver = make_driver(max_model_len=20)
    driver.add(make_request("fits", range(19)))
    with pytest.raises(RequestTooLarge, match=r"20 tokens, and the limit is 20 .* shorten the prompt to 19"):
        driver.add(make_request("a", range(20)))
    driver.run()
    driver.check_ended()


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    driver = make_driver(num_blocks=4)
    assert driver.scheduler.max_request_tokens == 17
    with pytest.raises(
        RequestTooLarge, match=r"10 tokens and up to 8 output .* make 18.* most 17 .*max_tokens to 7 or"
    ):
        driver.add(make_request("a", range(10), max_tokens=8))
    with pytest.raises(RequestTooLarge, match=r"shorten the prompt, or start the worker with more KV cache memory"):
        driver.add(make_request("b", range(17)))
    assert not driver.scheduler.has_work()
    driver.add(make_request("c", range(10), max_tokens=7), make_request("d", range(16)))
    driver.run()
    driver.check_ended()


def test_the_models_limit_ends_a_request_whose_max_tokens_would_pass_it() -> None:
    driver = make_driver(num_blocks=4, max_model_len=12)
    driver.add(make_request("a", range(10), max_tokens=1000))
    driver.run()
    assert (len(driver.outputs["a"]), driver.ends["a"]) == (2, FinishReason.LENGTH)


def test_an_empty_prompt_and_an_id_in_use_are_refused() -> None:
    driver = make_driver()
    with pytest.raises(ValueError, match="empty prompt"):
        driver.add(make_request("a", []))
    driver.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="in use"):
        driver.add(make_request("a", [1]))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_that_could_serve_nothing_are_refused(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}
    SchedulerConfig(**limits, eos_token_ids=frozenset())
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{**limits, name: 0}, eos_token_ids=frozenset())
    with pytest.raises(ValueError, match="joint_prefill_tokens"):
        SchedulerConfig(**limits, eos_token_ids=frozenset(), joint_prefill_tokens=-1)
