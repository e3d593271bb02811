"""The engine process: owns the model, the scheduler and the KV cache, and never touches HTTP.

Started by the API process (engine_supervisor) as `python -m engine_worker.serving.engine_process`. It reads its orders
from standard input, loads the model with progress messages, and then runs the loop until it is told to stop.

It must not outlive its parent, which may be killed without a word. So it asks the kernel for SIGKILL at the parent's
death (Linux), and watches standard input, which the parent holds open: its end means the same (everywhere).
Ctrl-C in a terminal reaches this process too and is ignored: the parent decides when to stop.

Exit codes: 0 told to stop, 1 the model can't be loaded (a LoadFailed message went out), 3 steps keep failing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol, cast

import msgspec

from engine_worker.config import EngineConfig, ModelInfo
from engine_worker.contract.state import TokenizerBundle
from engine_worker.core.kv_manager import KVCacheManager
from engine_worker.core.scheduler import Scheduler, SchedulerConfig
from engine_worker.model.errors import ModelError
from engine_worker.serving.engine_loop import EngineBroken, EngineLoop, LaunchingRunner, Runner
from engine_worker.serving.kv_publisher import KVPublisher
from engine_worker.serving.messages import (
    BEAT_S,
    Beat,
    LoadFailed,
    Progress,
    Ready,
    StartOrder,
)
from engine_worker.serving.pipe import EngineSide
from engine_worker.serving.speculate import Speculator

logger = logging.getLogger("warmgate.engine")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EXIT_LOAD_FAILED = 1
_EXIT_BROKEN = 3


class ModelRunner(Runner, Protocol):
    """What a loader gives: engine_worker.model.runner's, or a test's."""

    info: ModelInfo
    tokenizer: TokenizerBundle


Loader = Callable[[EngineConfig, Callable[[str], None]], ModelRunner]


class _StopSignal:
    """Set by SIGTERM. While the model loads, SIGTERM ends the process as it would any other."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, signum: int, frame: FrameType | None) -> None:
        self.is_set = True


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    line = sys.stdin.buffer.readline()
    if not line or os.getppid() != parent:
        return 0  # the parent has gone already
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    order = msgspec.json.decode(line, type=StartOrder)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    pipe = EngineSide(order.descriptor)
    try:
        return _serve(order, pipe)
    finally:
        pipe.close()


def _die_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not through the buffer, whose lock would outlast the main thread
        pass
    os._exit(0)


def _serve(order: StartOrder, pipe: EngineSide) -> int:
    def progress(detail: str) -> None:
        pipe.send(Progress(detail))

    try:
        publisher = _publisher(order.config)
        runner = _loader(order.loader)(order.config, progress)
        scheduler = _scheduler(order.config, runner.info)
    except (ModelError, _CannotPublish) as error:
        pipe.send(LoadFailed(str(error)))
        return _EXIT_LOAD_FAILED
    except Exception as error:  # nobody foresaw it, so the log gets all of it
        logger.exception("the engine could not be set up")
        pipe.send(LoadFailed(f"The engine could not be set up ({type(error).__name__}: {error})."))
        return _EXIT_LOAD_FAILED
    stop = _StopSignal()
    stop.install()
    gc.collect()
    gc.freeze()  # the model stays; collections need not walk over it
    threading.Thread(target=_beat, args=(pipe,), daemon=True).start()
    endpoints = (publisher.endpoint, publisher.replay_endpoint) if publisher else ("", "")
    pipe.send(Ready(runner.info, runner.tokenizer, *endpoints))
    drafter = getattr(runner, "drafter", None)
    speculator = None
    if drafter is not None:
        config = order.config
        speculator = Speculator(scheduler, drafter, config.num_speculative_tokens, config.always_speculate)
    loop = EngineLoop(
        scheduler,
        runner,
        pipe,
        pipe.send,
        publisher,
        order.check_invariants,
        # Guesses go on from the last step's tokens, so with them a step can't be planned before these are known.
        None if speculator else _launcher(order.config, runner),
        speculator,
    )
    try:
        loop.run(lambda: stop.is_set)
    except EngineBroken as error:
        logger.error("the engine gives up: %s", error)
        return _EXIT_BROKEN
    finally:
        if publisher is not None:
            publisher.close()
    return 0


def _beat(pipe: EngineSide) -> None:
    """Tell the API process for ever that this one runs. A process that is stopped tells nothing."""
    with contextlib.suppress(OSError):  # the pipe is closed: this process is about to end
        while True:
            time.sleep(BEAT_S)
            pipe.send(Beat())


class _CannotPublish(Exception):
    """The address for KV events can't be had."""


def _publisher(config: EngineConfig) -> KVPublisher | None:
    if not config.kv_events_endpoint or not config.enable_prefix_caching:
        return None
    try:
        return KVPublisher(config.kv_events_endpoint)
    except OSError as error:
        raise _CannotPublish(f"KV events can't be published: {error}. Choose another --kv-events-port.") from error


def _launcher(config: EngineConfig, runner: ModelRunner) -> LaunchingRunner | None:
    """The runner, where steps are to be scheduled asynchronously. On a CPU the host's work is the device's."""
    wanted = config.async_scheduling == "on" or (
        config.async_scheduling == "auto" and runner.info.device.startswith("cuda")
    )
    return cast(LaunchingRunner, runner) if wanted and hasattr(runner, "launch") else None


def hits_partially(config: EngineConfig, device: str) -> bool:
    """On a CPU a few tokens cost more than their copy; a GPU computes them beside the rest of a step."""
    return config.partial_hits == "on" or (config.partial_hits == "auto" and not device.startswith("cuda"))


def _loader(path: str) -> Loader:
    module, _, name = path.partition(":")
    return cast(Loader, getattr(importlib.import_module(module), name))


def _scheduler(config: EngineConfig, info: ModelInfo) -> Scheduler:
    kv = KVCacheManager(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        cache_root=info.cache_root,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_partial_hits=hits_partially(config, info.device),
    )
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(info.eos_token_ids),
        joint_prefill_tokens=config.joint_prefill_tokens,
    )
    return Scheduler(limits, kv)


if __name__ == "__main__":
    sys.exit(main())
