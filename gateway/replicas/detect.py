"""Finding out which engine answers at a URL, from what its model list calls its owner."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config import DialectName
from gateway.replicas.dialect import ControlClient, Dialect, fetch_models
from gateway.replicas.generic import GenericDialect
from gateway.replicas.llamacpp import LlamacppDialect
from gateway.replicas.sglang import SglangDialect
from gateway.replicas.vllm import VllmDialect
from gateway.replicas.warmgate import WarmgateDialect

_DIALECTS: dict[str, Callable[[ControlClient], Dialect]] = {
    "warmgate": WarmgateDialect,
    "vllm": VllmDialect,
    "sglang": SglangDialect,
    "llamacpp": LlamacppDialect,
    "generic": GenericDialect,
}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "llama.cpp": "llamacpp"}


async def detect(client: ControlClient, configured: DialectName) -> Dialect:
    """The replica's dialect. Raises PollError while nothing usable answers."""
    if configured != "auto":
        return _DIALECTS[configured](client)
    if await WarmgateDialect.recognise(client):
        return WarmgateDialect(client)
    owners = (await fetch_models(client)).owners
    name = next((_OWNERS[owner.lower()] for owner in owners if owner.lower() in _OWNERS), "generic")
    return _DIALECTS[name](client)
