"""Chains with readable keys, and fleets to route in."""

from __future__ import annotations

from policies.events import Dispatched, Finished, FirstToken, Joined
from policies.fleet import FleetConfig, FleetState
from policies.types import BlockKey, KeySpace, PrefixChain, Rates, ReplicaId, ReplicaView, RouteRequest

SPACE = KeySpace("tokens/16")
BLOCK = 16
MODEL = "m"
RATES = Rates(base_s=0.01, linear_s=1e-4, quadratic_s=2e-9, decode_step_s=0.02, num_observations=10, decode_kv_s=1e-7)


def key(path: str) -> BlockKey:
    """The key of the block that ends the prefix `path`: one letter a block."""
    return BlockKey(int.from_bytes(path.encode()) + (1 << 120))


def keys(path: str) -> tuple[BlockKey, ...]:
    """Root first: the keys of all prefixes of `path`."""
    return tuple(key(path[: i + 1]) for i in range(len(path)))


def chain(path: str, tail_tokens: int = 3) -> PrefixChain:
    return PrefixChain(keys(path), BLOCK, len(path) * BLOCK + tail_tokens)


def request(request_id: str, path: str, **extra: object) -> RouteRequest:
    prompt = chain(path)
    return RouteRequest(request_id, MODEL, prompt.num_tokens, {SPACE: prompt}, **extra)  # type: ignore[arg-type]


def joined(name: str, num_blocks: int = 1000, at: float = 0.0, incarnation: str = "one") -> Joined:
    return Joined(at, ReplicaId(name), incarnation, frozenset({MODEL}), SPACE, BLOCK, num_blocks)


def fleet_of(*names: str, num_blocks: int = 1000, config: FleetConfig | None = None) -> FleetState:
    fleet = FleetState(config)
    for name in names:
        fleet.apply(joined(name, num_blocks))
    return fleet


def dispatch(fleet: FleetState, name: str, request_id: str, path: str, at: float, matched: int = 0) -> None:
    fleet.apply(Dispatched(at, ReplicaId(name), request_id, chain(path), matched))


def serve(
    fleet: FleetState, name: str, request_id: str, path: str, at: float, prefill_s: float = 0.1,
    cached: int | None = None, matched: int = 0,
) -> None:  # fmt: skip
    """A whole request: dispatch, first token, finish."""
    dispatch(fleet, name, request_id, path, at, matched)
    fleet.apply(FirstToken(at + prefill_s, ReplicaId(name), request_id, cached))
    fleet.apply(Finished(at + prefill_s + 0.1, ReplicaId(name), request_id, 10, cached))


def matched_blocks(fleet: FleetState, path: str, now: float = 0.0) -> dict[str, int]:
    """Blocks of `path` that each routable replica is expected to hold."""
    views = fleet.snapshot(request("probe", path), now).replicas
    return {view.replica_id: view.matched_tokens // BLOCK for view in views}


def view(name: str, **changes: object) -> ReplicaView:
    values: dict[str, object] = {
        "replica_id": ReplicaId(name),
        "incarnation": "one",
        "num_tokens": 1003,
        "matched_tokens": 0,
        "queued_prefill_tokens": 0,
        "queued_prefill_s": 0.0,
        "num_waiting": 0,
        "num_running": 0,
        "kv_usage": 0.0,
        "rates": RATES,
    }
    return ReplicaView(**(values | changes))  # type: ignore[arg-type]
