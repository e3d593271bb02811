"""SGLang: /v1/models for what it serves, /metrics (when started with --enable-metrics) for its load.

Its radix cache matches by page; the page size and the cache's capacity come from /get_server_info once.
"""

from __future__ import annotations

import msgspec

from engine_worker.contract.state import TokenizerBundle
from gateway.replicas.dialect import ControlClient, Report, count, fetch_models, read_samples
from policies.types import ReplicaStatus

_RUNNING = "sglang:num_running_reqs"
_WAITING = "sglang:num_queue_reqs"
_USAGE = "sglang:token_usage"
_NAMES = frozenset({_RUNNING, _WAITING, _USAGE})


class _ServerInfo(msgspec.Struct, frozen=True):
    page_size: int | None = None
    max_total_num_tokens: int | None = None


class SglangDialect:
    name = "sglang"

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._info: _ServerInfo | None = None

    async def poll(self) -> Report:
        models = await fetch_models(self._client)
        if self._info is None:
            self._info = await self._server_info()
        response = await self._client.get("/metrics")
        samples = read_samples(response.text, _NAMES) if response.status_code == 200 else {}
        page = count(self._info.page_size or 0)
        return Report(
            status=ReplicaStatus.READY,
            models=models.ids,
            block_tokens=page,
            num_blocks=count(self._info.max_total_num_tokens or 0) // page if page else 0,
            has_load=_RUNNING in samples,
            num_running=count(samples.get(_RUNNING, 0)),
            num_waiting=count(samples.get(_WAITING, 0)),
            kv_usage=min(1.0, max(0.0, samples.get(_USAGE, 0.0))),
        )

    async def tokenizer(self) -> TokenizerBundle | None:
        return None

    async def _server_info(self) -> _ServerInfo:
        response = await self._client.get("/get_server_info")
        if response.status_code != 200:
            return _ServerInfo()
        try:
            return msgspec.json.decode(response.content, type=_ServerInfo)
        except msgspec.DecodeError:
            return _ServerInfo()
