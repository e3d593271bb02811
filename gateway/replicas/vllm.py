"""vLLM: /v1/models for what it serves, /metrics for its load and KV capacity.

`process_start_time_seconds` tells one process from the next. Where the page lacks it (several API processes), a
restart shows as a refused connection, which the monitor sees.
"""

from __future__ import annotations

from engine_worker.contract.state import TokenizerBundle
from gateway.replicas.dialect import ControlClient, PollError, Report, count, fetch_models, read_labels, read_samples
from policies.types import ReplicaStatus

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second is older releases' name
_STARTED = "process_start_time_seconds"
_MAX_DIGITS = 20
_NAMES = frozenset({_RUNNING, _WAITING, *_USAGE, _STARTED})


class VllmDialect:
    name = "vllm"

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._models: frozenset[str] = frozenset()

    async def poll(self) -> Report:
        if not self._models:
            self._models = (await fetch_models(self._client)).ids
        response = await self._client.get("/metrics")
        if response.status_code != 200:
            self._models = (await fetch_models(self._client)).ids
            return Report(status=ReplicaStatus.READY, models=self._models)
        samples = read_samples(response.text, _NAMES)
        if _RUNNING not in samples:
            self._models = frozenset()
            raise PollError(f"/metrics has no {_RUNNING}")
        config = read_labels(response.text, "vllm:cache_config_info")
        usage = next((samples[name] for name in _USAGE if name in samples), 0.0)
        return Report(
            status=ReplicaStatus.READY,
            models=self._models,
            incarnation=f"{samples[_STARTED]:.2f}" if _STARTED in samples else "",
            block_tokens=_int(config.get("block_size")),
            num_blocks=_int(config.get("num_gpu_blocks")),
            has_load=True,
            num_running=count(samples[_RUNNING]),
            num_waiting=count(samples.get(_WAITING, 0)),
            kv_usage=min(1.0, max(0.0, usage)),
        )

    async def tokenizer(self) -> TokenizerBundle | None:
        return None


def _int(text: str | None) -> int:
    return count(int(text[:_MAX_DIGITS])) if text is not None and text.isdecimal() else 0
