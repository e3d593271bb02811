"""What goes to the engine for a call."""

from __future__ import annotations

from dataclasses import replace

from engine_worker.serving.engine_client import EngineClient
from engine_worker.serving.messages import Add, Sequence, ToEngine
from engine_worker.serving.pipe import framed
from tests.engine_worker.serving.calls import prepared_call

LONG = [90_000 + i for i in range(5000)]


def sent_for(n: int, **params: object) -> Add:
    """The message for two prompts, the second of which is long, with `n` choices each."""
    sent: list[ToEngine] = []
    client = EngineClient()
    client.connect(sent.append)
    call = prepared_call(n=n, **params)
    client.submit(replace(call, prompts=([1, 2], LONG), params=call.params * 2))
    client.check_invariants()
    [add] = sent
    assert isinstance(add, Add)
    return add


def test_hundreds_of_choices_bring_their_prompt_once() -> None:
    """Otherwise a body of a few megabytes would become gigabytes in the engine."""
    allowed = tuple(range(70_000, 75_000))
    one, many = (len(framed(sent_for(n, allowed_token_ids=allowed))) for n in (1, 128))
    assert one > 5 * len(LONG)
    assert many < one + 2 * 128 * 20


def test_choices_are_numbered_prompt_by_prompt_with_a_seed_each() -> None:
    first, second = sent_for(3, seed=7).sequences
    assert isinstance(first, Sequence)
    assert [first.request_id, *first.choices] == ["r0", ("r1", 8), ("r2", 9)]
    assert [second.request_id, *second.choices] == ["r3", ("r4", 8), ("r5", 9)]
    assert [choice for one in sent_for(3).sequences for choice in one.choices] == [
        ("r1", None),
        ("r2", None),
        ("r4", None),
        ("r5", None),
    ]
