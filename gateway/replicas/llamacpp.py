"""llama.cpp's server: /health says whether the model is loaded, /v1/models its name, /metrics (--metrics) its load."""

from __future__ import annotations

from engine_worker.contract.state import TokenizerBundle
from gateway.replicas.dialect import ControlClient, Report, count, fetch_models, read_samples
from policies.types import ReplicaStatus

_RUNNING = "llamacpp:requests_processing"
_WAITING = "llamacpp:requests_deferred"
_USAGE = "llamacpp:kv_cache_usage_ratio"
_NAMES = frozenset({_RUNNING, _WAITING, _USAGE})


class LlamacppDialect:
    name = "llamacpp"

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._has_metrics = True

    async def poll(self) -> Report:
        health = await self._client.get("/health")
        models = await fetch_models(self._client)
        status = ReplicaStatus.READY if health.status_code == 200 else ReplicaStatus.LOADING
        samples: dict[str, float] = {}
        if self._has_metrics:
            response = await self._client.get("/metrics")
            self._has_metrics = response.status_code == 200
            samples = read_samples(response.text, _NAMES) if self._has_metrics else {}
        return Report(
            status=status,
            models=models.ids,
            has_load=_RUNNING in samples,
            num_running=count(samples.get(_RUNNING, 0)),
            num_waiting=count(samples.get(_WAITING, 0)),
            kv_usage=min(1.0, max(0.0, samples.get(_USAGE, 0.0))),
        )

    async def tokenizer(self) -> TokenizerBundle | None:
        return None
