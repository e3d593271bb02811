"""Going on with another worker's answer: marks in a stream, and the order to continue from one.

Theory. What a worker writes is a function of its request and of the tokens that it sampled: characters held back, stop
strings, tool calls and log probabilities follow from them. So an answer that was cut can be continued exactly wherever
it is known which tokens had gone into the events that were passed on: another worker puts them through the same
functions, says nothing of what that gives, and goes on.

Marks. A stream that is asked for with the header x-warmgate-marks says this at the head of its events, in a comment:

    : t 17,4711
    data: {...}

A worker that speculates adds, whenever they have changed, how many tokens it had speculated for the answer up to the
last of those, and how many of them had been right: `: t 17,4711;8,3`.

Passing on the events up to and with this one means having passed on all that those tokens make, and the tokens of
earlier marks before them. A mark may be empty (an event that is made of no token) and tells tokens once. Events
without a mark in front of a marked one belong to it; those behind the last mark, which a finished answer has, belong to
its end. So who relays a marked stream passes on events up to the last marked one, or all of them with [DONE]; and to
whom it is relayed, marks are comments.

The header's value says which requests are wanted marked: `exact` those whose answer is determined (greedy, or with a
seed), `all` sampled ones too (what follows is then new, and distributed as it would have been). The answer carries the
header if the stream is marked. Requests with more than one choice are not.

The order. POST /internal/resume with a ResumeOrder as JSON, and a secret where the worker has one. The answer is a
stream without what was passed on: the rest of the events, with the same id, and the usage of the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

MARKS_HEADER = b"x-warmgate-marks"
RESUME_PATH = "/internal/resume"
MARK = b": t "
MAX_OUTPUT_IDS = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]


class ResumeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Continue this request.

    path           where the client's request went: /v1/chat/completions or /v1/completions
    request        its body
    id, created, model
                   as in the events that were passed on
    output_ids     all tokens that went into those
    cached_tokens  of the prompt, as the first worker found them: what the usage says
    draft_tokens, accepted_tokens
                   speculated for the `output_ids`, and right: the usage adds its own
    """

    path: str
    request: msgspec.Raw
    id: str
    created: int
    model: str
    output_ids: list[int]
    cached_tokens: int | None = None
    draft_tokens: Count = 0
    accepted_tokens: Count = 0


def marked(event: bytes, token_ids: Iterable[int], drafts: tuple[int, int] | None = None) -> bytes:
    """The event with its mark. `drafts`: tokens speculated up to here and those of them that were right, if told."""
    ids = b",".join(b"%d" % token_id for token_id in token_ids)
    return MARK + ids + (b"" if drafts is None else b";%d,%d" % drafts) + b"\n" + event
