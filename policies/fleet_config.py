"""The settings of FleetState."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`default_capacity_tokens` sizes the mirror of a replica that does not tell its number of blocks;
    `prediction_ttl_s` is how long after a request's end a replica's KV events may still confirm its blocks.

    What makes the mirror true, each by itself: `mirror_pins` blocks from dispatch to finish (else they are as young as
    their dispatch); `mirror_outputs` leaves room for what running requests write; `mirror_learns` the capacity.
    """

    default_capacity_tokens: int = 262_144
    prediction_ttl_s: float = 10.0
    initial_output_tokens: float = 200.0
    mirror_pins: bool = True
    mirror_outputs: bool = True
    mirror_learns: bool = True
