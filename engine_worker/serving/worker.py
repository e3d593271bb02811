"""What the API process knows of the worker at this moment: its status, and what routes need of a loaded model."""

from __future__ import annotations

import functools
import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from engine_worker.config import EngineConfig, ModelInfo
from engine_worker.contract.errors import ApiError
from engine_worker.contract.prompt import PromptRenderer
from engine_worker.contract.state import SpeculationState, WorkerState, WorkerStatus
from engine_worker.serving.engine_client import EngineClient
from engine_worker.serving.engine_supervisor import EngineSupervisor
from engine_worker.serving.generate import Generator
from engine_worker.serving.messages import Ready, Step
from engine_worker.serving.metrics import WorkerMetrics
from engine_worker.serving.prepare import Preparer
from engine_worker.serving.token_text import TokenText

logger = logging.getLogger("warmgate.worker")

_NUM_TOKENIZER_THREADS = 2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Made anew for each life of the engine; a request keeps the one it started with."""

    ready: Ready
    preparer: Preparer
    generator: Generator


class Worker:
    """One worker's API process: the engine's supervisor and client, and what routes need from a loaded model."""

    def __init__(
        self,
        config: EngineConfig,
        served_models: tuple[str, ...],
        secret: str,
        *,
        loader: str,
        check_invariants: bool = False,
    ) -> None:
        self.config = config
        self.served_models = served_models
        self.secret = secret
        self.executor = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self.metrics = WorkerMetrics(served_models[0])
        self.client = EngineClient()
        self.supervisor = EngineSupervisor(
            config,
            self.client,
            loader=loader,
            check_invariants=check_invariants,
            on_ready=self._on_ready,
            on_step=self._on_step,
            on_lost=self._on_lost,
        )
        self.failure: str | None = None
        self.draining = False
        self._loaded: LoadedModel | None = None
        self._tools: tuple[PromptRenderer, TokenText] | None = None

    @property
    def status(self) -> WorkerStatus:
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self._loaded is not None else "loading"

    def loaded(self) -> LoadedModel:
        """The model. Raises ApiError 503 while there is none, or none for new requests."""
        if self.draining:
            raise ApiError(503, "The worker is shutting down.", code="draining", retry_after_s=5)
        if self._loaded is None:
            detail = self.failure or self.supervisor.detail or "loading"
            raise ApiError(503, f"The model is not ready: {detail}", code="engine_not_ready", retry_after_s=5)
        return self._loaded

    def drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self.draining = True
        self.client.refusal = ApiError(503, "The worker is shutting down.", code="draining", retry_after_s=5)

    def state(self) -> WorkerState:
        ready = self.supervisor.ready
        stats = self.client.stats
        info = ready.info if ready else None
        return WorkerState(
            status=self.status,
            incarnation=self.supervisor.incarnation,
            version=_version(),
            model=self.config.model,
            served_models=list(self.served_models),
            tokenizer_fingerprint=ready.tokenizer.fingerprint if ready else "",
            model_fingerprint=_fingerprint(ready) if ready else "",
            dtype=info.dtype if info else "",
            device=info.device if info else "",
            max_model_len=info.max_model_len if info else 0,
            block_size=info.block_size if info else 0,
            kv_cache_dtype=info.kv_cache_dtype if info else "",
            kv_block_bytes=info.kv_block_bytes if info else 0,
            kv_block_bytes_saved=info.kv_block_bytes_saved if info else 0,
            quantization=info.quantization if info else "",
            weight_bytes=info.weight_bytes if info else 0,
            weight_bytes_saved=info.weight_bytes_saved if info else 0,
            num_blocks_bought=info.num_blocks_bought if info else 0,
            num_blocks=info.num_blocks if info else 0,
            num_free_blocks=stats.num_free_blocks if stats.num_blocks or not info else info.num_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            step_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens,
            num_preemptions=stats.num_preemptions,
            num_idle_checks=stats.num_idle_checks,
            num_copied_tokens=stats.num_copied_tokens,
            kv_events_endpoint=ready.kv_events_endpoint if ready else "",
            kv_events_replay_endpoint=ready.kv_events_replay_endpoint if ready else "",
            speculation=self._speculation(),
            detail=self.failure or self.supervisor.detail,
        )

    def _speculation(self) -> SpeculationState | None:
        stats = self.client.stats
        if not self.config.speculative:
            return None
        return SpeculationState(
            method=self.config.speculative,
            is_active=stats.is_speculating,
            num_speculative_tokens=self.config.num_speculative_tokens,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
        )

    def _on_ready(self, ready: Ready) -> None:
        renderer, tokens = self._text_tools(ready)
        preparer = Preparer(ready.info, renderer, self.served_models)
        generator = Generator(preparer, tokens, self.client, self.metrics, self.executor)
        self._loaded = LoadedModel(ready, preparer, generator)
        self.metrics.model_loaded(ready.info)
        logger.info("ready: %s, %s", self.served_models[0], described(ready.info))

    def _text_tools(self, ready: Ready) -> tuple[PromptRenderer, TokenText]:
        """The tokenizer's tools, kept from the last life where they are the same: making them takes a moment."""
        if self._tools is None or self._tools[0].bundle != ready.tokenizer:
            renderer = PromptRenderer(ready.tokenizer)
            self._tools = (renderer, TokenText(renderer.tokenizer))
            if renderer.changes_every_second:
                logger.warning("the chat template prints the time of day, so chats share no cached prefix behind it")
        return self._tools

    def _on_step(self, step: Step) -> None:
        self.metrics.step(step)

    def _on_lost(self) -> None:
        self._loaded = None
        self.metrics.engine_lost()


def described(info: ModelInfo) -> str:
    """One line about a loaded model."""
    return (
        f"{info.architecture} in {info.dtype} on {info.device}, {info.attention_backend} attention, "
        f"{info.num_threads} thread(s); {info.kv_cache_dtype or info.dtype} KV cache of {info.num_blocks} blocks, "
        f"{info.num_blocks * info.block_size} tokens, {info.num_blocks * info.kv_block_bytes / 2**30:.2f} GiB; "
        f"sequences up to {info.max_model_len} tokens" + (f"; {info.detail}" if info.detail else "")
    )


def _fingerprint(ready: Ready) -> str:
    """Of all that decides what a request's tokens are and what is written of them."""
    parts = (ready.info.cache_root.hex(), ready.tokenizer.fingerprint, str(ready.info.max_model_len), _version())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _version() -> str:
    try:
        return version("warmgate")
    except PackageNotFoundError:  # run from a source tree
        return "0.0.0"
