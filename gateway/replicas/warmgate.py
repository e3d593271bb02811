"""Our own worker: GET /internal/state says everything, GET /internal/tokenizer serves its tokenizer."""

from __future__ import annotations

import msgspec

from engine_worker.contract.state import TokenizerBundle, WorkerState
from gateway.replicas.dialect import ControlClient, PollError, Report, count
from policies.types import ReplicaStatus

_STATUS = {
    "loading": ReplicaStatus.LOADING,
    "ready": ReplicaStatus.READY,
    "draining": ReplicaStatus.DRAINING,
    "failed": ReplicaStatus.DOWN,
}


class WarmgateDialect:
    name = "warmgate"

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    @classmethod
    async def recognise(cls, client: ControlClient) -> bool:
        """Whether a bundled worker answers there. Raises PollError when nothing answers."""
        response = await client.get("/internal/state")
        if response.status_code in (401, 403):
            raise PollError("/internal/state wants a secret: set WARMGATE_SECRET as the worker has it")
        if response.status_code != 200:
            return False
        try:
            msgspec.json.decode(response.content, type=WorkerState)
        except msgspec.DecodeError:
            return False
        return True

    async def poll(self) -> Report:
        response = await self._client.get("/internal/state")
        if response.status_code != 200:
            raise PollError(f"/internal/state answered {response.status_code}")
        try:
            state = msgspec.json.decode(response.content, type=WorkerState)
        except msgspec.DecodeError as error:
            raise PollError(f"/internal/state can't be read ({error}); do versions differ?") from error
        num_blocks = count(state.num_blocks)
        used = num_blocks - min(count(state.num_free_blocks), num_blocks)
        return Report(
            status=_STATUS[state.status],
            models=frozenset(state.served_models or ([state.model] if state.model else [])),
            base_model=state.model,
            incarnation=state.incarnation,
            block_tokens=count(state.block_size),
            num_blocks=num_blocks,
            step_tokens=count(state.step_tokens),
            num_seats=count(state.max_num_seqs),
            has_load=True,
            num_running=count(state.num_running),
            num_waiting=count(state.num_waiting),
            kv_usage=used / num_blocks if num_blocks else 0.0,
            queued_prefill_tokens=count(state.queued_prefill_tokens),
            tokenizer_fingerprint=state.tokenizer_fingerprint,
            model_fingerprint=state.model_fingerprint,
            kv_events_endpoint=state.kv_events_endpoint,
            kv_events_replay_endpoint=state.kv_events_replay_endpoint,
            detail=state.detail,
        )

    async def tokenizer(self) -> TokenizerBundle | None:
        response = await self._client.get("/internal/tokenizer", timeout_s=30.0)
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise PollError(f"/internal/tokenizer answered {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=TokenizerBundle)
        except msgspec.DecodeError as error:
            raise PollError(f"/internal/tokenizer can't be read ({error}); do versions differ?") from error
