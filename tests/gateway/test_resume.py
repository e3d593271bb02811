"""Rows 4 to 8 of the failure catalogue where the answer can be continued: nothing twice, nothing missing, one end."""

from __future__ import annotations

import asyncio
import codecs
import json
from typing import Any

import pytest

from loadtest.fake_script import Script
from tests.gateway.harness import CHAT, Replica, Running, gateway, tokens, until

COUNT = 12
ALL = [f" t{n}" for n in range(COUNT)]
STREAM = {**CHAT, "stream": True, "temperature": 0, "max_tokens": COUNT, "stream_options": {"include_usage": True}}
COMMENT = b": resumed on another replica\n\n"


def replicas(count: int, **script: Any) -> list[Replica]:
    """Bundled workers, as far as the gateway can see."""
    made = [Replica(incarnation=f"life-{n}") for n in range(count)]
    for replica in made:
        replica.play(**script)
    return made


async def ask(running: Running, **fields: Any) -> Any:
    return await running.client.post("/v1/chat/completions", json={**STREAM, **fields})


def is_error_end(text: str) -> bool:
    last = text.rstrip().splitlines()[-1]
    return last.startswith('data: {"error"') and "[DONE]" not in text and '"finish_reason":"stop"' not in text


def check_invisible(body: bytes, undisturbed: bytes, num_resumes: int = 1) -> None:
    """But for a comment, it is the answer that would have come."""
    assert body.count(COMMENT) == num_resumes
    assert body.replace(COMMENT, b"") == undisturbed
    assert b": t " not in body
    assert b'"completion_tokens":%d' % COUNT in body


FAULTS = ["die", "stall", "error", "no_finish", "no_done", "endless"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("after", [2, 5, COUNT - 1, COUNT])
async def test_whatever_breaks_an_answer_another_replica_goes_on_with_it(fault, after):
    bad, good = replicas(2)
    async with gateway(bad, good, stream_idle_s=0.3, max_sse_line_bytes=4096) as running:
        undisturbed = (await ask(running)).content
        bad.play(fault=fault, after=after, token_s=0.01, times=1)
        answers = [await ask(running) for _ in range(2)]
        assert [tokens(answer.content) for answer in answers] == [ALL, ALL]
        [broken] = [answer for answer in answers if answer.content != undisturbed]
        check_invisible(broken.content, undisturbed)
        assert (good.log.num_resumed, good.log.num_bad_resumes) == (1, 0)


async def test_a_byte_order_mark_stays_at_the_beginning():
    bad, good = replicas(2, bom=True)
    async with gateway(bad, good) as running:
        undisturbed = (await ask(running)).content
        assert undisturbed.startswith(codecs.BOM_UTF8)
        bad.play(bom=True, fault="die", after=5, times=1)
        [broken] = [body for _ in range(2) if COMMENT in (body := (await ask(running)).content)]
        check_invisible(broken, undisturbed)
        assert good.log.num_bad_resumes == 0


async def test_tokens_that_were_speculated_count_wherever_that_was():
    bad, good = replicas(2, guesses=4)
    async with gateway(bad, good) as running:
        undisturbed = (await ask(running)).content
        assert b'"accepted_prediction_tokens":%d,"rejected_prediction_tokens":%d' % (COUNT, 3 * COUNT) in undisturbed
        bad.play(guesses=4, fault="die", after=5, times=1)
        [broken] = [body for _ in range(2) if COMMENT in (body := (await ask(running)).content)]
        check_invisible(broken, undisturbed)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
async def test_other_apis_go_on_too(path):
    body = {
        "/v1/completions": {"prompt": "hi", "max_tokens": COUNT},
        "/v1/messages": {"messages": CHAT["messages"], "max_tokens": COUNT},
        "/v1/responses": {"input": "hi", "max_output_tokens": COUNT},
    }[path]
    bad, good = replicas(2, num_tokens=COUNT)
    async with gateway(bad, good) as running:
        bad.play(num_tokens=COUNT, fault="die", after=6, times=1)
        for _ in range(2):
            sent = {"model": "fake", "stream": True, "temperature": 0, **body}
            answer = await running.client.post(path, json=sent)
            assert [token for token in tokens(answer.content) if token in ALL][:COUNT] == ALL
            assert b'"server_error"' not in answer.content
        assert good.log.num_resumed == 1


async def test_a_client_that_wants_no_usage_gets_none():
    bad, good = replicas(2)
    async with gateway(bad, good) as running:
        bad.play(fault="die", after=3, times=1)
        answers = [await ask(running, stream_options=None) for _ in range(2)]
        assert all(tokens(answer.content) == ALL for answer in answers)
        assert not any(b'"usage"' in answer.content for answer in answers)
        assert good.log.num_resumed == 1


async def test_a_second_break_is_gone_on_with_a_third_is_the_end():
    workers = replicas(4)
    async with gateway(*workers) as running:
        undisturbed = (await ask(running)).content
        for num_faults in (1, 2, 3):
            await until(lambda: len(running.app.registry.ready()) == 4)
            lives = [Script(fault="die", after=2 * n, token_s=0.01) for n in range(1, num_faults + 1)]
            for replica in workers:
                replica.worker.next_scripts = lives
            answer = await ask(running)
            if num_faults < 3:
                check_invisible(answer.content, undisturbed, num_faults)
            else:
                assert tokens(answer.content) == ALL[:6]
                assert is_error_end(answer.text)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"resume": "off"}, {}),
        ({}, {"temperature": 0.7}),
        ({"resume": "all"}, {"temperature": 0.7, "n": 2}),
    ],
)
async def test_what_is_not_to_be_continued_ends_in_an_error_event(settings, fields):
    bad, good = replicas(2)
    async with gateway(bad, good, **settings) as running:
        bad.play(fault="die", after=3, times=1)
        answers = [await ask(running, **fields) for _ in range(2)]
        [broken] = [answer for answer in answers if answer.headers["x-warmgate-replica"] == bad.name]
        assert tokens(broken.content) == ALL[:3]
        assert is_error_end(broken.text)
        assert b": t " not in broken.content
        assert good.log.num_resumed == 0


@pytest.mark.parametrize(("settings", "fields"), [({}, {"seed": 1}), ({"resume": "all"}, {})])
async def test_sampled_answers_are_continued_with_a_seed_or_by_a_setting(settings, fields):
    bad, good = replicas(2)
    async with gateway(bad, good, **settings) as running:
        bad.play(fault="die", after=3, times=1)
        answers = [await ask(running, temperature=0.7, **fields) for _ in range(2)]
        assert [tokens(answer.content) for answer in answers] == [ALL, ALL]


async def test_only_a_worker_of_the_same_kind_goes_on():
    bad, other, foreign = Replica(incarnation="a"), Replica(incarnation="b"), Replica()
    async with gateway(bad, other, foreign) as running:
        running.app.registry.get(bad.name).model_fingerprint = "of another version"
        bad.play(fault="die", after=3, times=1)
        running.app.registry.reports = lambda *_: None  # or the next poll would tell the true one
        answers = [await ask(running) for _ in range(3)]
        assert sorted(len(tokens(answer.content)) for answer in answers) == [3, COUNT, COUNT]
        assert sum(is_error_end(answer.text) for answer in answers) == 1
        assert running.events("warmgate_resumes_total") == 1  # given up


async def test_a_request_whose_continuation_is_refused_ends_in_our_words():
    bad, good = replicas(2)
    async with gateway(bad, good) as running:
        bad.worker.next_scripts = good.worker.next_scripts = [
            Script(fault="die", after=3),
            Script(fault="status", status=400),
        ]
        broken = await ask(running)
        assert bad.log.num_resumed + good.log.num_resumed == 1
        assert is_error_end(broken.text)
        assert "told to refuse" not in broken.text
        assert "replica_failed" in broken.text


async def test_a_request_at_which_two_workers_died_is_not_given_to_a_third():
    workers = replicas(3)
    async with gateway(*workers) as running:
        by_name = {replica.name: replica for replica in workers}
        for replica in workers:
            replica.play(fault="stall", after=3, token_s=0.0)
        async with running.client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
            body = b""
            first = by_name[answer.headers["x-warmgate-replica"]]
            chunks = answer.aiter_bytes()
            while len(tokens(body)) < 3:
                body += await anext(chunks)
            for replica in workers:
                if replica is not first:
                    replica.play(fault="stall", after=6)
            await first.stop()
            second = None
            async for chunk in chunks:
                body += chunk
                if len(tokens(body)) == 6 and second is None:
                    [second] = [replica for replica in workers if replica.log.num_resumed]
                    await second.stop()
        assert tokens(body) == ALL[:6]
        assert b"request_quarantined" in body
        assert is_error_end(body.decode())


async def test_a_replica_that_answers_no_poll_any_more_loses_its_streams():
    bad, good = replicas(2)
    async with gateway(bad, good) as running:
        bad.play(fault="stall", after=3)
        good.play(fault="stall", after=3, times=0)
        registry = running.app.registry
        pending = [asyncio.ensure_future(ask(running)) for _ in range(2)]
        await until(lambda: bad.log.num_in_flight == 1 and good.log.num_finished == 1)
        stuck = registry.get(bad.name)
        await until(lambda: stuck.waiting and running.app.fleet.num_leases() == 1)
        while not all(task.done() for task in pending):
            registry.interrupt_waiting(stuck)
            await asyncio.sleep(0.01)
        assert [tokens(task.result().content) for task in pending] == [ALL, ALL]


async def test_a_client_that_leaves_while_its_answer_waits_to_go_on_stops_it():
    bad, good = replicas(2)
    async with gateway(bad, good) as running:
        bad.play(fault="die", after=3, times=1)
        good.play(first_token_s=60.0)
        done = asyncio.ensure_future(ask(running))
        other = asyncio.ensure_future(ask(running))
        await until(lambda: good.log.num_resumed == 1)
        done.cancel()
        other.cancel()
        await until(lambda: good.log.num_in_flight == 0)
        await asyncio.gather(done, other, return_exceptions=True)


async def test_the_log_says_from_where_to_where(tmp_path):
    bad, good = replicas(2)
    path = tmp_path / "access.log"
    async with gateway(bad, good, access_log=str(path)) as running:
        bad.play(fault="die", after=4, times=1)
        await asyncio.gather(*(ask(running) for _ in range(2)))
        assert running.events("warmgate_resumes_total") == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    [line] = [line for line in lines if "resumed_from" in line]
    assert line["resumed_from"] == [bad.name]
    assert line["replica"] == good.name
    assert (line["end"], line["attempts"], line["output_tokens"]) == ("completed", 2, COUNT)


async def test_many_answers_break_at_once_and_all_go_on():
    """The retry budget is for an overloaded fleet: what a dead replica had is moved, all of it."""
    bad, good = replicas(2)
    bad.play(fault="stall", after=5)
    async with gateway(bad, good) as running:
        pending = [asyncio.ensure_future(ask(running)) for _ in range(60)]
        await until(lambda: bad.log.num_in_flight == 30 and running.app.fleet.num_leases() == 30)
        await bad.stop()
        answers = await asyncio.gather(*pending)
        assert all(tokens(answer.content) == ALL for answer in answers)
        assert good.log.num_bad_resumes == 0
