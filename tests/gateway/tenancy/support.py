"""Keys for tests, and gateways that ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from gateway.tenancy.keys import Limits, new_key
from gateway.tenancy.store import FileStore
from tests.gateway.harness import CHAT, Running


class Keys:
    """A file of keys. `make` returns a key, `ids` its id."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.store = FileStore(self.path)
        self.ids: dict[str, str] = {}

    def make(self, tenant: str, *models: str, priority: Any = "normal", **limits: int) -> str:
        key, record = new_key(tenant, models, priority, Limits(**limits))
        self.store.put(record)
        self.ids[key] = record.id
        return key


async def ask(running: Running, key: str | None, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await running.client.post(path, json={**CHAT, **fields}, headers=headers)
