"""What happens when: harms drawn from a seed, so that the same seed is the same trouble. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill_worker", "stop_worker", "harm_link",
    "kill_gateway", "term_gateway",
    "stop_redis", "kill_redis", "flush_redis",
]  # fmt: skip
LinkHarm = Literal["slow", "narrow", "slices", "truncate", "reset", "stall", "refuse"]

_WEIGHTS: dict[Kind, float] = {
    "kill_worker": 0.28,
    "stop_worker": 0.22,
    "harm_link": 0.20,
    "kill_gateway": 0.08,
    "term_gateway": 0.06,
    "stop_redis": 0.06,
    "kill_redis": 0.05,
    "flush_redis": 0.05,
}
_LINK_HARMS: tuple[LinkHarm, ...] = ("slow", "narrow", "slices", "truncate", "reset", "stall", "refuse")
# Two harms of one sort never overlap: see the package's docstring.
SORTS: dict[Kind, str] = {
    "kill_worker": "worker",
    "stop_worker": "worker",
    "harm_link": "link",
    "kill_gateway": "gateway",
    "term_gateway": "gateway",
    "stop_redis": "redis",
    "kill_redis": "redis",
    "flush_redis": "redis",
}
_REST_S = 1.0  # between two harms of the same sort, so that the first is over


@dataclass(frozen=True, slots=True)
class Harm:
    """At `at_s` from the start, `kind` is done to number `target` for `for_s` seconds. `link` says how to a link,
    `amount` how much of it: bytes before the cut, or of a slice."""

    at_s: float
    kind: Kind
    target: int
    for_s: float
    link: LinkHarm | None = None
    amount: int = 0

    @property
    def sort(self) -> str:
        return SORTS[self.kind]

    def __str__(self) -> str:
        what = f"{self.kind}({self.link}, {self.amount})" if self.link else self.kind
        return f"{self.at_s:7.2f} s  {what} {self.target} for {self.for_s:.2f} s"


def harms(seed: int, every_s: float, num_workers: int, num_gateways: int, with_redis: bool = True) -> Iterator[Harm]:
    """Without end: about one harm every `every_s`. Each kill or stop lasts from a third of `every_s` to all of it
    (at least 1.5 s, so that it is noticed), and begins only when the last one of its sort is over."""
    rng = random.Random(f"harms/{seed}")
    weights = {kind: w for kind, w in _WEIGHTS.items() if with_redis or SORTS[kind] != "redis"}
    free_at = dict.fromkeys(SORTS.values(), 0.0)
    counts = {"worker": num_workers, "link": num_workers, "gateway": num_gateways, "redis": 1}
    at = 0.0
    while True:
        at += every_s * rng.uniform(0.7, 1.3)
        [kind] = rng.choices(list(weights), weights=list(weights.values()))
        sort = SORTS[kind]
        starts = max(at, free_at[sort])
        for_s = max(every_s * rng.uniform(0.33, 1.0), 1.5)
        if kind == "stop_worker":
            for_s *= 1.3  # a frozen one is noticed later than a dead one
        link: LinkHarm | None = None
        amount = 0
        if kind == "harm_link":
            link = rng.choice(_LINK_HARMS)
            amount = rng.choice((1, 7, 64)) if link == "slices" else rng.randrange(200, 20_000)
        if kind == "flush_redis":
            for_s = 0.0
        free_at[sort] = starts + for_s + _REST_S
        yield Harm(starts, kind, rng.randrange(counts[sort]), for_s, link, amount)


def schedule(
    seed: int, duration_s: float, every_s: float, num_workers: int, num_gateways: int, with_redis: bool = True
) -> list[Harm]:
    """The harms that begin within `duration_s`, by time."""
    found = []
    for harm in harms(seed, every_s, num_workers, num_gateways, with_redis):
        if harm.at_s > duration_s * 2:  # `at_s` may wait for its turn, so a later one may still begin before
            break
        if harm.at_s <= duration_s:
            found.append(harm)
    return sorted(found, key=lambda harm: harm.at_s)
