"""Asks a child over HTTP how far it is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import httpx
import msgspec

from engine_worker.contract.state import WorkerState
from gateway.supervise.machine import Role
from gateway.supervise.plan import ChildSpec


class _Replica(msgspec.Struct):
    state: str
    models: list[str]


class _Health(msgspec.Struct):
    """The part of the gateway's /health that counts here."""

    replicas: list[_Replica]


@dataclass(frozen=True, slots=True)
class Progress:
    """`ready`: it serves. `failed`: it says of itself that it never will; `detail` then says why."""

    ready: bool = False
    failed: bool = False
    detail: str = ""
    model: str = ""


async def probe(client: httpx.AsyncClient, spec: ChildSpec, *, all_replicas: bool) -> Progress:
    """One question; a child that doesn't answer yet is simply not ready.

    `all_replicas`: the gateway counts as ready only when every replica is, not with the first one.
    """
    try:
        return await (_worker(client, spec) if spec.role is Role.WORKER else _gateway(client, spec, all_replicas))
    except (httpx.HTTPError, msgspec.MsgspecError):
        return Progress(detail="starting")


async def _worker(client: httpx.AsyncClient, spec: ChildSpec) -> Progress:
    secret = os.environ.get("WARMGATE_SECRET", "")
    headers = {"x-warmgate-secret": secret} if secret else {}
    response = await client.get(f"{spec.url}/internal/state", headers=headers)
    response.raise_for_status()
    state = msgspec.json.decode(response.content, type=WorkerState)
    model = state.served_models[0] if state.served_models else state.model
    return Progress(state.status == "ready", state.status == "failed", state.detail, model)


async def _gateway(client: httpx.AsyncClient, spec: ChildSpec, all_replicas: bool) -> Progress:
    response = await client.get(f"{spec.url}/health")
    response.raise_for_status()
    health = msgspec.json.decode(response.content, type=_Health)
    ready = [replica for replica in health.replicas if replica.state == "ready"]
    if not ready or (all_replicas and len(ready) < len(health.replicas)):
        return Progress(detail=f"{len(ready)} of {len(health.replicas)} replicas ready")
    return Progress(ready=True, model=next((model for replica in ready for model in replica.models), ""))
