"""Which row of the logits stands for what: a segment's one row, or with speculation one for each token it may bring.

Row `number` of a segment is what may follow the output and the first `number` drafts. All rows are chosen from at once,
each as if the drafts before it were right: penalties, bad words, masks and noise are those of its own position. What
was chosen then tells which rows count: those up to the first draft that is not what was chosen in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_worker.core.types import Request, Segment


@dataclass(frozen=True, slots=True)
class Row:
    """Row `index` of the logits: what may follow `output_ids` in the request's answer."""

    index: int
    request: Request
    output_ids: Sequence[int]
    number: int = 0


@dataclass(slots=True)
class Rows:
    """One segment's rows. `num_usable` shrinks where nothing can be chosen from a row behind the first."""

    segment: Segment
    rows: tuple[Row, ...]
    num_usable: int

    @property
    def request(self) -> Request:
        return self.segment.request

    @property
    def usable(self) -> tuple[Row, ...]:
        return self.rows[: self.num_usable]

    def verified(self, chosen: Sequence[int]) -> tuple[Row, ...]:
        """The rows that count, of which the last one's choice is no draft. `chosen` is by index of the logits."""
        count = 1
        for row, draft_id in zip(self.usable[1:], self.segment.draft_ids, strict=False):
            if chosen[row.index - 1] != draft_id:
                break
            count += 1
        return self.rows[:count]


def rows_of(segments: Sequence[Segment]) -> list[Rows]:
    """Rows in the segments' order, each segment's side by side."""
    result, index = [], 0
    for segment in segments:
        request, drafts = segment.request, segment.draft_ids
        contexts = [request.output_ids, *([*request.output_ids, *drafts[:n]] for n in range(1, len(drafts) + 1))]
        rows = tuple(Row(index + number, request, context, number) for number, context in enumerate(contexts))
        result.append(Rows(segment, rows, len(rows)))
        index += len(rows)
    return result
