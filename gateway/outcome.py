"""What a request's record and lease hear of its answer: what the answer says of itself, and its end.

Both ways through the gateway (relay.py, straight_run.py) come to these steps.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.exchange import Failure, ReplicaRefused
from gateway.observe.record import RequestRecord
from gateway.openai.errors import error_of
from gateway.openai.frames import FRAME, Frame, Usage
from gateway.router import Lease
from gateway.upstream_types import UpstreamError, UpstreamFailure
from policies.events import FailureKind


def reused(said: int | None, usage: Usage | None, num_before: int = 0) -> int | None:
    """The input tokens that a replica reused, by its head (`said`) or else its usage: no more than it had, which were
    the prompt's and the `num_before` that other replicas had answered."""
    if usage is None:
        return said
    cached = usage.cached_tokens if said is None else said
    if cached is None or usage.prompt_tokens is None:
        return cached
    return min(cached, usage.prompt_tokens + num_before)


def finish(
    record: RequestRecord, lease: Lease, usage: Usage | None, num_events: int, num_before: int, cached: int | None
) -> None:
    """The answer is complete: end the lease, and note what it was. Of its tokens `num_before` came from other replicas,
    and were input to this one; `cached` of its input this one says that it reused."""
    num_output = num_events + num_before
    if usage is not None:
        num_output = usage.completion_tokens if usage.completion_tokens is not None else num_output
        record.prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else record.prompt_tokens
        cached = reused(cached, usage, num_before)
        if record.cached_tokens is None or not num_before:
            record.cached_tokens = cached
    elif record.endpoint in ("tokenize", "detokenize"):
        record.prompt_tokens = None  # an estimate, of what was no prompt
    record.output_tokens = num_output
    num_input = None if usage is None or usage.prompt_tokens is None else usage.prompt_tokens + num_before
    lease.finish(max(0, num_output - num_before), cached, num_input)


def read_frame(body: bytes) -> Frame:
    """A whole answer's usage. Raises UpstreamError when it is not JSON, ReplicaRefused when it is an error."""
    try:
        frame = FRAME.decode(body)
    except msgspec.ValidationError:
        return Frame()  # JSON of another shape: nothing of ours in it
    except (msgspec.DecodeError, RecursionError) as error:
        raise UpstreamError(UpstreamFailure.BROKEN, f"its answer is not JSON ({error})") from error
    if frame.failure is not None and not frame.choices:
        raise ReplicaRefused(error_failure(frame.failure))
    return frame


def error_failure(error: dict[str, Any]) -> Failure:
    """An error object that came with status 200, given the status that it deserves."""
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    told = error_of(error, status)
    return Failure(FailureKind.REJECTED, status, told.message, body=told.body(), upstream_status=status)
