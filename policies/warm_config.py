"""The settings of `warm`, by themselves because `warm_queue` adds to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WarmConfig:
    """Each refinement by itself, so that its worth can be measured.

    tau              recompute tax, in own prefills
    kappa            weight of decode seconds
    delay            weight of the delay to those waiting
    later            weight of the delay to those who will come, L_i p_i
    duplicate_price  weight of e_i; 0 charges nothing
    room             weight of the charge for new blocks while half of the replicas have room
    seats            weight of s_i; 0 leaves it out
    quadratic        whether attention's quadratic term counts in p_i
    order            whether replicas are told p_i, to serve by it
    overtake         whether W_i leaves out what the request overtakes there (with `order`)
    alike            whether those under way with the same prefix share the cost of one more copy of it
    """

    tau: float = 1.0
    kappa: float = 0.1
    delay: float = 1.0
    later: float = 1.0
    duplicate_price: float = 1.0
    room: float = 1.0
    seats: float = 0.5
    quadratic: bool = True
    order: bool = True
    overtake: bool = True
    alike: bool = True
