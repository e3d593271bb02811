"""Marks in streams, and going on with another worker's answer; contract/resume.py says what both mean.

Everything that is written of an answer (characters held back, stop strings, tool calls, offsets of log probabilities)
follows from its tokens. So the tokens that were sent elsewhere go through the same objects as ever, what comes out is
dropped, and the next token finds them as they were there.

The one thing that doesn't follow from the tokens are log probabilities. Where they are asked for together with stop
strings or calls that must not be repeated, some may wait behind text that is held back while other text goes out; such
streams are not marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from engine_worker.contract.errors import ApiError
from engine_worker.contract.resume import MAX_OUTPUT_IDS, ResumeOrder, marked
from engine_worker.serving import sse
from engine_worker.serving.prepare import PreparedCall, Preparer
from engine_worker.serving.validation import invalid

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

Drafts = tuple[int, int]  # tokens speculated, and those of them that were right
NO_DRAFTS: Drafts = (0, 0)


class Marks:
    """The frames of one stream, with its tokens told in marks: `note` each as it comes, `passed` in the same order.

    With a token come the tokens that had been speculated for the answer up to it, and those of them that were right.

    A token is told with the first event that it or a later one makes. One whose text or log probability is held back
    is not told before: it will be sampled again.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[int, Drafts]] = deque()
        self._silent: list[int] = []  # behind the last event
        self._untold: list[int] = []
        self._drafts: Drafts = NO_DRAFTS  # up to the last of the untold
        self._told_drafts: Drafts = NO_DRAFTS

    def note(self, token_id: int, drafts: Drafts = NO_DRAFTS) -> None:
        self._noted.append((token_id, drafts))

    def passed(self, has_event: bool) -> None:
        """The next of the noted tokens has been made into events, or it has made none."""
        token_id, drafts = self._noted.popleft()
        self._silent.append(token_id)
        if has_event:
            self._drafts = drafts
            self._untold += self._silent
            self._silent.clear()

    def frames(self, payloads: Sequence[bytes]) -> bytes:
        """What the tokens that passed have made, at least one payload. The mark stands in front of the last."""
        news = None if self._drafts == self._told_drafts else self._drafts
        event = marked(sse.frames(payloads[-1:]), self._untold, news)
        self._untold.clear()
        self._told_drafts = self._drafts
        return sse.frames(payloads[:-1]) + event

    @staticmethod
    def ping() -> bytes:
        return marked(sse.PING, ())


def marks_for(prepared: PreparedCall, wanted: bytes | None) -> Marks | None:
    """Marks if they are wanted and the answer can be continued. `wanted` is the value of x-warmgate-marks."""
    if wanted is None or not prepared.stream or len(prepared.prompts) * prepared.n != 1 or prepared.prompt_only:
        return None
    holds_back = prepared.stops or (prepared.tools is not None and not prepared.tools.may_repeat)
    if prepared.num_logprobs is not None and holds_back:
        return None
    params = prepared.params[0]
    is_exact = params.is_greedy or params.seed is not None
    return Marks() if wanted == b"all" or (wanted == b"exact" and is_exact) else None


def read_order(body: bytes) -> ResumeOrder:
    """Raises ApiError 400."""
    try:
        order = msgspec.json.decode(body, type=ResumeOrder)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"The order to resume can't be read: {error}.") from None
    if order.path not in (CHAT_PATH, COMPLETION_PATH):
        raise invalid("path", f"`path` must be {CHAT_PATH} or {COMPLETION_PATH}.")
    if len(order.output_ids) > MAX_OUTPUT_IDS:
        raise invalid("output_ids", f"`output_ids` may hold at most {MAX_OUTPUT_IDS} tokens.")
    return order


def prepare(preparer: Preparer, order: ResumeOrder) -> PreparedCall:
    """The rest of the request. Raises ApiError. Runs off the event loop."""
    call = (preparer.chat if order.path == CHAT_PATH else preparer.completion)(bytes(order.request))
    if not call.stream or len(call.prompts) * call.n != 1 or call.prompt_only:
        raise invalid("request", "Only a stream of one choice can be resumed.")
    preparer.check_ids(order.output_ids, "output_ids")
    params = call.params[0]
    if len(order.output_ids) >= params.max_tokens:
        raise invalid("output_ids", f"`output_ids` must be fewer than the {params.max_tokens} tokens of the answer.")
    return replace(
        call,
        model=order.model,
        params=(replace(params, num_prompt_logprobs=None),),
        num_prompt_logprobs=None,
        output_ids=order.output_ids,
        told_cached=order.cached_tokens,
        told_drafts=(order.draft_tokens, order.accepted_tokens),
    )


def ended_already() -> ApiError:
    return invalid("output_ids", "`output_ids` end in a stop string, behind which nothing can follow.")
