"""When a sequence ends, and why."""

from __future__ import annotations

import pytest

from engine_worker.core.finish import finish_reason
from engine_worker.core.types import FinishReason
from tests.engine_worker.core.fake_runner import make_request

EOS, STOP = 2, 7


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([5], {}, None),
        ([EOS], {}, FinishReason.STOP),
        ([EOS], {"ignore_eos": True}, None),
        ([STOP], {}, None),
        ([STOP], {"stop_token_ids": (STOP,)}, FinishReason.STOP),
        ([STOP], {"stop_token_ids": (STOP,), "ignore_eos": True}, FinishReason.STOP),
        ([EOS], {"stop_token_ids": (EOS,), "ignore_eos": True}, None),
        ([STOP, 5], {"stop_token_ids": (STOP,)}, None),
        ([5, EOS], {"min_tokens": 2}, None),
        ([5, STOP], {"min_tokens": 2, "stop_token_ids": (STOP,)}, None),
        ([5, 5, EOS], {"min_tokens": 2}, FinishReason.STOP),
        ([5] * 4, {}, FinishReason.LENGTH),
        ([5] * 3 + [EOS], {}, FinishReason.STOP),
        ([5] * 3 + [EOS], {"ignore_eos": True}, FinishReason.LENGTH),
        ([5] * 3 + [EOS], {"min_tokens": 4}, FinishReason.LENGTH),
    ],
)
def test_rules(output: list[int], params: dict[str, object], expected: FinishReason | None) -> None:
    request = make_request("r", [1, 1], max_tokens=4, **params)
    request.output_ids = output
    assert finish_reason(request, max_model_len=100, eos_token_ids=frozenset({EOS})) is expected


def test_the_model_length_counts_the_prompt() -> None:
    request = make_request("r", [1, 1], max_tokens=50)
    request.output_ids = [5, 5]
    assert finish_reason(request, max_model_len=5, eos_token_ids=frozenset()) is None
    request.output_ids.append(5)
    assert finish_reason(request, max_model_len=5, eos_token_ids=frozenset()) is FinishReason.LENGTH
