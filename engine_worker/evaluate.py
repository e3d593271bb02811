"""What narrower weights and KV caches cost in quality: `python -m engine_worker.evaluate --model demo`.

The model is loaded as a worker loads it, dense and in each format, and all read the same text, as a prompt would go:
in chunks, keys and values through the cache. Reported are each one's perplexity, and the share of positions at which
its likeliest next token (the one that greedy decoding takes) is the dense model's. The exit code is 1 where a bound is
missed. Without further arguments every format is compared that the device can do; `--quantization` and
`--kv-cache-dtype` choose one of each, measured together.

The bounds leave a margin to what the demo model showed on the text that comes along, 956 tokens, float32 on a CPU with
AVX-512, all formats in one run (which takes a core five minutes):

    weights  int8 +0.6 %, 94.8 % agree    int4 +0.1 %, 98.0 % (see below)
    KV       int8  0.0 %, 98.5 %    fp8 0.0 %, 96.1 %    fp4 +5.6 %, 87.0 %    k8v4 +1.0 %, 96.0 %

The demo model is small (135 million parameters) and small models lose most. Its weights come from a GGUF file in Q4_1,
which is lossy already; everything here is relative to those weights in float32, that is, to the GGUF's own quality.
A reading is good to about half a percent, by which other kernels or another order of sums move it. int4 gives such
weights back as they were, so that only its int8 head is left to see. Its bound is for weights on no grid: of the
demo model with its channels in another order, which changes no output, the perplexity rises by 4.1 % (and did by 19 %
when all inputs counted alike, see importance.py).

tests/engine_worker/model/test_quantize.py holds weights, and test_kv_quality.py caches, to these bounds on half the
text. No test holds fp8 weights to theirs, as their products need a CUDA device: run this there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from engine_worker.config import ATTENTION_BACKENDS, EngineConfig
from engine_worker.model.errors import ModelError

TEXT = Path(__file__).parent / "model" / "evaluation.txt"
# format -> (largest increase of the perplexity, least agreement), both as shares
BOUNDS = {"int8": (0.01, 0.93), "int4": (0.10, 0.78), "fp8": (0.03, 0.92)}
KV_BOUNDS = {"int8": (0.01, 0.96), "fp8": (0.01, 0.94), "fp4": (0.08, 0.85), "k8v4": (0.02, 0.93)}
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Reading:
    """How a model read a text: its perplexity, and its likeliest next token at every position.

    `kv_token_bytes` are what a token's keys and values take over all layers.
    """

    perplexity: float
    best: tuple[int, ...]
    weight_bytes: int
    kv_token_bytes: float
    detail: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """`increase` of the perplexity as a share of the dense one; `agreement` of likeliest tokens, as a share."""

    dense: Reading
    quantized: Reading

    @property
    def increase(self) -> float:
        return self.quantized.perplexity / self.dense.perplexity - 1

    @property
    def agreement(self) -> float:
        pairs = list(zip(self.dense.best, self.quantized.best, strict=True))
        return sum(a == b for a, b in pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table: formats of weights ("" is dense) and of the cache ("auto" is dense)."""

    quantization: str = ""
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        parts = [f"{self.quantization} weights"] if self.quantization else []
        parts += [f"{self.kv_cache_dtype} KV"] if self.kv_cache_dtype != "auto" else []
        return ", ".join(parts) or "dense"

    @property
    def bounds(self) -> tuple[float, float]:
        """Of both formats together: losses add up."""
        found = [BOUNDS[self.quantization]] if self.quantization else []
        found += [KV_BOUNDS[self.kv_cache_dtype]] if self.kv_cache_dtype != "auto" else []
        return sum(bound[0] for bound in found), 1 - sum(1 - bound[1] for bound in found)


def read_text(config: EngineConfig, text: str, max_tokens: int | None = None) -> Reading:
    """Load the model and let it read `text`, or its first `max_tokens`, in chunks. Raises ModelError."""
    import torch
    from tokenizers import Tokenizer

    from engine_worker.core.types import BlockId, Request, SamplingParams, Segment, StepPlan
    from engine_worker.model.load import load_model

    runner = load_model(config, lambda message: None)
    ids = Tokenizer.from_str(runner.tokenizer.tokenizer_json).encode(text, add_special_tokens=False).ids
    ids = ids[: min(runner.info.max_model_len - 1, max_tokens or len(ids))]
    if len(ids) < 2:
        raise ModelError("The text is too short: it must have at least two tokens.")
    params = SamplingParams(max_tokens=1, num_prompt_logprobs=1)
    request = Request(request_id="text", prompt_ids=tuple(ids), params=params, arrival_s=0.0)
    request.block_ids = [BlockId(index) for index in range(-(-len(ids) // runner.info.block_size))]
    total, best = 0.0, []
    for start in range(0, len(ids), _CHUNK):
        end = min(len(ids), start + _CHUNK)
        segment = Segment(request, start, tuple(ids[start:end]), request.block_ids, sample=False)
        result = runner.execute(StepPlan((segment,)))
        if result.failed:
            raise ModelError(f"The model can't read the text: {result.failed['text']}")
        for token in result.prompt_logprobs["text"]:
            assert token.logprob is not None
            total += token.logprob
            best.append(max(token.top_logprobs, key=lambda pair: pair[1])[0])
        request.num_scored = min(end, len(ids) - 1)
    perplexity = float(torch.tensor(-total / (len(ids) - 1)).exp())
    info = runner.info
    return Reading(perplexity, tuple(best), info.weight_bytes, info.kv_block_bytes / info.block_size, info.detail)


def variants(device: str, has_fp8: bool) -> Iterator[Variant]:
    """Every format of weights, then every one of the cache, that a device of this type can do."""
    for kind in BOUNDS:
        if kind != "fp8" or (device == "cuda" and has_fp8):
            yield Variant(quantization=kind)
    for name in KV_BOUNDS:
        yield Variant(kv_cache_dtype=name)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    chosen = Variant(args.quantization, args.kv_cache_dtype)
    try:
        text = _text(args.text)
        device, has_fp8 = _device(args.device, chosen.quantization)
        dtype = "float32" if device == "cpu" and args.dtype == "auto" else args.dtype
        config = EngineConfig(
            model=args.model, device=device, dtype=dtype, max_num_seqs=1, attention_backend=args.attention_backend,
            self_test=False,
        )  # fmt: skip
        rows = [chosen] if chosen != Variant() else list(variants(device, has_fp8))
        return 0 if _compare(config, rows, text, args) else 1
    except (ModelError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2


def _compare(config: EngineConfig, rows: list[Variant], text: str, args: argparse.Namespace) -> bool:
    """Print the table, a line as soon as it is known. Returns whether every bound was kept."""
    print(
        f"{'':24} {'perplexity':>10} {'increase':>18} {'agreement':>18} {'weights':>12} {'KV a token':>12} {'took':>7}"
    )
    dense = None
    is_kept = True
    for variant in (Variant(), *rows):
        begin = perf_counter()
        setting = replace(config, quantization=variant.quantization, kv_cache_dtype=variant.kv_cache_dtype)
        reading = read_text(setting, text, args.max_tokens)
        dense = dense or reading
        found = Comparison(dense, reading)
        shown = [""] * 2
        if variant != Variant():
            max_increase, min_agreement = variant.bounds
            max_increase = max_increase if args.max_increase is None else args.max_increase
            min_agreement = min_agreement if args.min_agreement is None else args.min_agreement
            is_kept = is_kept and found.increase <= max_increase and found.agreement >= min_agreement
            shown = [f"{found.increase:+.2%} (<{max_increase:+.0%})", f"{found.agreement:.1%} (>{min_agreement:.0%})"]
        print(
            f"{variant.name:24} {reading.perplexity:10.3f} {shown[0]:>18} {shown[1]:>18} "
            f"{reading.weight_bytes / 2**20:8.1f} MiB {reading.kv_token_bytes:10.0f} B {perf_counter() - begin:5.1f} s",
            flush=True,
        )
    print(f"{len(dense.best) if dense else 0} positions; " + ("within all bounds" if is_kept else "BEYOND A BOUND"))
    return is_kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine_worker.evaluate", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="demo", help="as for the worker (default %(default)s)")
    add("--quantization", choices=tuple(BOUNDS), default="", help="weights in this format only")
    add("--kv-cache-dtype", choices=("auto", *KV_BOUNDS), default="auto", help="KV cache in this format only")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--attention-backend", choices=ATTENTION_BACKENDS, default="auto", help="as for the worker")
    add("--text", type=Path, default=TEXT, help="a file to read (default: a text that comes along)")
    add("--max-tokens", type=int, default=1024, help="of the text (default %(default)s)")
    add("--max-increase", type=float, help="of the perplexity, as a share (default: each format's own)")
    add("--min-agreement", type=float, help="of likeliest tokens, as a share (default: each format's own)")
    return parser


def _text(path: Path) -> str:
    """Raises ModelError where there is nothing to read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"There is no file {path}: give --text one, or leave it out for the text that comes along."
        ) from None
    except OSError as error:
        raise ModelError(f"The text {path} can't be read ({error.strerror}): give --text another file.") from None
    except UnicodeDecodeError:
        raise ModelError(f"The text {path} is not UTF-8: give --text another file.") from None


def _device(name: str, quantization: str) -> tuple[str, bool]:
    """The device's type, and whether it multiplies fp8. Raises ModelError for a device that isn't there or that can't
    do `quantization`: before the dense model is read, which takes long."""
    from engine_worker.model.checkpoint_dtype import choose_device
    from engine_worker.model.quantize import check_quantization, has_fp8_units

    device = choose_device(name)
    check_quantization(quantization, device)
    return device.type, has_fp8_units(device)


if __name__ == "__main__":
    sys.exit(main())
