"""`python -m engine_worker.gpu_check`: see the package."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine_worker.gpu_check import correctness, speculation
from engine_worker.gpu_check.report import Report
from engine_worker.gpu_check.speed import LargeModel, Limits
from engine_worker.model import attention
from engine_worker.model.checkpoint_dtype import choose_device
from engine_worker.model.errors import ModelError

TOTAL_S = 460  # of the whole check; what has not begun by then is left out
_TINY_FACTOR = 3  # for Triton's interpreter on a CPU that others use, too


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_check", description="Prove and time a CUDA device.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="everything in miniature, to try the check itself")
    parser.add_argument("--json", type=Path, help="write all rows to this file, as they come")
    parser.add_argument("--only", default="", help="names of sections, comma-separated")
    args = parser.parse_args(argv)
    try:
        device = choose_device(args.device)
    except ModelError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("gpu_check: on a CPU the kernels need Triton's interpreter: set TRITON_INTERPRET=1.", file=sys.stderr)
        return 2
    attention.register()
    report = Report(json_path=args.json)
    begin = time.perf_counter()
    factor = _TINY_FACTOR if args.tiny else 1
    with tempfile.TemporaryDirectory() as name:
        there = sections(report, device, Path(name), args.tiny)
        chosen = {part.strip() for part in args.only.split(",") if part.strip()}
        if unknown := sorted(chosen - there.keys()):
            print(
                f"gpu_check: there is no section {', '.join(unknown)} here; choose among {', '.join(there)}.",
                file=sys.stderr,
            )
            return 2
        if args.only and not chosen:
            print(f"gpu_check: --only names no section; choose among {', '.join(there)}.", file=sys.stderr)
            return 2
        for section, (budget_s, run) in there.items():
            if chosen and section not in chosen:
                continue
            left = TOTAL_S * factor - (time.perf_counter() - begin)
            if left < 5:
                report.section = section
                report.add("the section", "left out: the time is up", ok=False)
                continue
            report.run(section, min(budget_s * factor, left), run)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"{len(report.rows)} rows, {len(report.failed)} failed, {time.perf_counter() - begin:.0f} s")
    for row in report.failed:
        print(f"{row.section}: {row.line().strip()}")
    return 1 if report.failed else 0


def sections(
    report: Report, device: torch.device, folder: Path, tiny: bool
) -> dict[str, tuple[float, Callable[[], None]]]:
    """Name -> (seconds at most, what to run). The most telling ones come first."""
    measured: list[Limits] = []

    def limits() -> Limits:
        if not measured:
            measured.append(Limits(report, device, tiny))
        return measured[0]

    def large(**settings: str) -> Callable[[], None]:
        return lambda: LargeModel(report, device, folder, limits(), tiny).variant(**settings)

    found: dict[str, tuple[float, Callable[[], None]]] = {
        "device": (30, lambda: _device(report, device, limits)),
        "dense": (150, lambda: LargeModel(report, device, folder, limits(), tiny).dense()),
        "kernels": (120, lambda: correctness.kernels(report, device, "triton", tiny)),
        "families": (90, lambda: correctness.families(report, device, folder, "triton", tiny)),
        "modes": (90, lambda: correctness.modes(report, device, folder, "triton", tiny)),
        "speculation": (60, lambda: speculation.speculation(report, device, folder, "triton", tiny)),
        "n-grams": (45, lambda: speculation.large_ngrams(LargeModel(report, device, folder, limits(), tiny))),
        "int8-kv": (60, large(kv_cache_dtype="int8")),
        "int8": (60, large(quantization="int8")),
        "int4": (60, large(quantization="int4")),
    }
    if device.type == "cuda":
        found["fp8"] = (60, large(quantization="fp8"))
        found["fp8-kv"] = (60, large(kv_cache_dtype="fp8"))
        if importlib.util.find_spec("flashinfer") is not None:  # the first run compiles its kernels
            found["flashinfer"] = (150, lambda: correctness.flashinfer(report, device, folder))
            found["flashinfer-large"] = (60, large(attention_backend="flashinfer"))
    return found


def _device(report: Report, device: torch.device, limits: Callable[[], Limits]) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report.add("device", name)
    report.add("torch", torch.__version__)
    report.add("transformers", importlib.import_module("transformers").__version__)
    report.add("triton", importlib.import_module("triton").__version__)
    limits()


if __name__ == "__main__":
    sys.exit(main())
