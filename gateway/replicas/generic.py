"""Any engine that speaks OpenAI's API: it is ready when /v1/models answers, and says nothing of its load."""

from __future__ import annotations

from engine_worker.contract.state import TokenizerBundle
from gateway.replicas.dialect import ControlClient, Report, fetch_models
from policies.types import ReplicaStatus


class GenericDialect:
    name = "generic"

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    async def poll(self) -> Report:
        models = await fetch_models(self._client)
        return Report(status=ReplicaStatus.READY, models=models.ids)

    async def tokenizer(self) -> TokenizerBundle | None:
        return None
