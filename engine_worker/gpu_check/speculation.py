"""Speculation on this device: the same greedy answers with it and without, how many guesses were right, what it buys.

Models with random weights say nothing that another could foresee. So the draft model is the model itself, which should
guess right always; and where n-grams guess, answers are made of two words only, so that they soon repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine_worker.core.types import SamplingParams
from engine_worker.gpu_check.correctness import GREEDY, prompts, tiny_config
from engine_worker.gpu_check.engine import Engine, Run, load, write_config
from engine_worker.gpu_check.report import Report
from engine_worker.gpu_check.speed import LargeModel, sampling

_WORDS = (7, 11)
_LEAST_RIGHT = 0.9  # of a model's own guesses: it computes them in other batches, so ties may fall otherwise


def speculation(report: Report, device: torch.device, folder: Path, backend_name: str, tiny: bool) -> None:
    """A tiny model in float32 with n-grams and with itself as its draft."""
    path = write_config(folder / "speculation", **tiny_config("llama"))
    params = replace(GREEDY, max_tokens=12) if tiny else replace(GREEDY, max_tokens=48)
    texts = prompts(tiny)
    settings: dict[str, Any] = {"dtype": "float32", "attention_backend": backend_name, "always_speculate": True}
    settings |= {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory": 32 << 20, "self_test": not tiny}
    for kind, name in (("ngram", "n-grams"), (str(path), "the model as its own draft")):
        engine, _ = load(path, str(device), speculative=kind, num_speculative_tokens=4, **settings)
        chosen = replace(params, allowed_token_ids=_WORDS) if kind == "ngram" else params
        plain, found = both(engine, texts, chosen, warm_up=not tiny)
        same = found.tokens == plain.tokens and not found.errors
        report.add(f"{name}: the same answers as without", str(same), ok=same)
        share = found.num_accepted_tokens / max(1, found.num_draft_tokens)
        tried = found.num_draft_tokens > 0
        report.add(f"{name}: guesses", float(found.num_draft_tokens), "tokens", tried)
        report.add(f"{name}: right", share, "of them", None if kind == "ngram" else share >= _LEAST_RIGHT)
        report.add(f"{name}: gain, tiny model", plain.decode_s() / found.decode_s(), "times")


def large_ngrams(large: LargeModel) -> None:
    """The large model with n-grams, one request and eight."""
    engine = large.load(speculative="ngram", always_speculate=True)
    length, steps = (9, 12) if large.tiny else (256, 96)
    params = replace(sampling(steps), allowed_token_ids=_WORDS)
    for batch in (1,) if large.tiny else (1, 8):
        texts = [large.prompt(length, 70 + index) for index in range(batch)]
        plain, found = both(engine, texts, params, warm_up=not large.tiny)
        if found.errors or plain.errors:
            raise RuntimeError((found.errors + plain.errors)[0])
        share = found.num_accepted_tokens / max(1, found.num_draft_tokens)
        large.report.add(f"n-grams, {batch} at once: guesses", float(found.num_draft_tokens), "tokens")
        large.report.add(f"n-grams, {batch} at once: right", share, "of them")
        large.report.add(f"n-grams, {batch} at once: gain", plain.decode_s() / found.decode_s(), "times")


def both(engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams, *, warm_up: bool) -> tuple[Run, Run]:
    """Without speculation and with it."""
    runs = []
    for speculate in (False, True):
        if warm_up:
            engine.run(texts, params, speculate=speculate)
        runs.append(engine.run(texts, params, speculate=speculate))
    return runs[0], runs[1]
