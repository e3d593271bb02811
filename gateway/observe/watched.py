"""What the shadows of several processes behind one port saw, as one: their sums add up, and each decision counts once.

A process tells its sums beside its own advice (`/advice?process=own`), and whichever is asked adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gateway.observe.shadow import Faded, Shadows


@dataclass(frozen=True, slots=True)
class Seen:
    """One policy's sums (shadow.py)."""

    spec: str
    num_decisions: int
    faded: Faded


@dataclass(frozen=True, slots=True)
class Watched:
    """All policies' sums; the names are those of Shadows."""

    share: float
    watched_s: float
    num_realised: float
    expected_s: float
    realised_s: float
    shadows: list[Seen]


@dataclass(frozen=True, slots=True)
class Told:
    """The part of a process's answer that others add up."""

    sums: Watched


def watched_by(shadows: Shadows) -> Watched:
    seen = [Seen(shadow.spec, shadow.num_decisions, shadow.faded) for shadow in shadows.shadows]
    return Watched(shadows.share, shadows.watched_s, shadows.num_realised, shadows.expected_s, shadows.realised_s, seen)


def together(parts: Sequence[Watched]) -> Watched:
    """`parts` (one at least) are of processes with the same settings. Watched for as long as the oldest."""
    specs = [seen.spec for seen in parts[0].shadows]
    return Watched(
        parts[0].share,
        max(part.watched_s for part in parts),
        sum(part.num_realised for part in parts),
        sum(part.expected_s for part in parts),
        sum(part.realised_s for part in parts),
        [_seen(spec, [seen for part in parts for seen in part.shadows if seen.spec == spec]) for spec in specs],
    )


def _seen(spec: str, each: Sequence[Seen]) -> Seen:
    sums = {field.name: sum(getattr(seen.faded, field.name) for seen in each) for field in fields(Faded)}
    return Seen(spec, sum(seen.num_decisions for seen in each), Faded(**sums))
