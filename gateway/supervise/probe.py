"""Asks a child over HTTP how far it is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import httpx
import msgspec

from engine_worker.contract.state import WorkerState
from gateway.supervise.machine import Role
from gateway.supervise.plan import ChildSpec


@dataclass(frozen=True, slots=True)
class Progress:
    """`ready`: it serves. `failed`: it says of itself that it never will; `detail` then says why."""

    ready: bool = False
    failed: bool = False
    detail: str = ""
    model: str = ""


async def probe(client: httpx.AsyncClient, spec: ChildSpec) -> Progress:
    """One question; a child that doesn't answer yet is simply not ready."""
    try:
        return await (_worker(client, spec) if spec.role is Role.WORKER else _gateway(client, spec))
    except (httpx.HTTPError, msgspec.MsgspecError):
        return Progress(detail="starting")


async def _worker(client: httpx.AsyncClient, spec: ChildSpec) -> Progress:
    secret = os.environ.get("WARMGATE_SECRET", "")
    headers = {"x-warmgate-secret": secret} if secret else {}
    response = await client.get(f"{spec.url}/internal/state", headers=headers)
    response.raise_for_status()
    state = msgspec.json.decode(response.content, type=WorkerState)
    model = state.served_models[0] if state.served_models else state.model
    return Progress(state.status == "ready", state.status == "failed", state.detail or state.status, model)


async def _gateway(client: httpx.AsyncClient, spec: ChildSpec) -> Progress:
    response = await client.get(f"{spec.url}/v1/models")
    if response.status_code != 200:
        return Progress(detail="waiting for a replica")
    models = response.json().get("data", [])
    return Progress(ready=bool(models), detail="waiting for a replica", model=models[0]["id"] if models else "")
