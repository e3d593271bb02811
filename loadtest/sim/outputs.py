"""Which blocks of answers come back in later prompts.

An engine names the blocks that an answer fills as it names prompt blocks, so the next turn of a conversation hits them.
A trace doesn't say so, but where a later prompt holds all of an earlier one's full blocks and is long enough for its
answer too, that answer is taken to stand there word for word: the ids of the blocks it filled are those of the later
prompt. (Of several such prompts the first counts; of several earlier ones, the longest.) A prompt of less than
MIN_BLOCKS says too little, since everybody shares the first blocks.
"""

from __future__ import annotations

from dataclasses import replace

from loadtest.sim.trace import Trace, TraceRequest

MIN_BLOCKS = 2


def with_outputs(trace: Trace) -> Trace:
    """The trace with `output_block_ids` filled in."""
    order = [(s, p) for s, session in enumerate(trace.sessions) for p in range(len(session))]
    if trace.timed:
        order.sort(key=lambda place: trace.sessions[place[0]][place[1]].at_s)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    open_tips: dict[int, tuple[int, int]] = {}  # hash of a prompt's full blocks -> whose answer is looked for
    for place in order:
        request = trace.sessions[place[0]][place[1]]
        tips = _tips(request.block_ids)
        for length in range(len(tips), MIN_BLOCKS - 1, -1):
            earlier_place = open_tips.get(tips[length - 1])
            if earlier_place is None:
                continue
            earlier = trace.sessions[earlier_place[0]][earlier_place[1]]
            if earlier.num_prompt_tokens + earlier.num_output_tokens <= request.num_prompt_tokens:
                found[earlier_place] = request.block_ids[length : _num_filled(earlier, trace.block_tokens)]
                del open_tips[tips[length - 1]]
            break
        if len(tips) >= MIN_BLOCKS:
            open_tips[tips[-1]] = place
    sessions = tuple(
        tuple(replace(request, output_block_ids=found.get((s, p), ())) for p, request in enumerate(session))
        for s, session in enumerate(trace.sessions)
    )
    return replace(trace, sessions=sessions)


def _tips(block_ids: tuple[int, ...]) -> list[int]:
    """A number for each prefix."""
    tips, tip = [], 0
    for block_id in block_ids:
        tip = hash((tip, block_id))
        tips.append(tip)
    return tips


def _num_filled(request: TraceRequest, block_tokens: int) -> int:
    """Full blocks of prompt and answer. The last token's KV is never stored."""
    return (request.num_prompt_tokens + request.num_output_tokens - 1) // block_tokens
