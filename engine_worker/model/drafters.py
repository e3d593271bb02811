"""Which drafter a worker's settings ask for."""

from __future__ import annotations

from engine_worker.config import EngineConfig
from engine_worker.model.draft_ngram import NgramDrafter
from engine_worker.model.errors import ModelError
from engine_worker.model.runner import Drafter

NGRAM = "ngram"


def make_drafter(config: EngineConfig) -> Drafter | None:
    """The drafter of `config.speculative`, None for none. Raises ModelError."""
    if not config.speculative:
        return None
    if config.speculative == NGRAM:
        return NgramDrafter(config.ngram_min, config.ngram_max)
    raise ModelError(f"--speculative {config.speculative} is unknown; use ngram.")
