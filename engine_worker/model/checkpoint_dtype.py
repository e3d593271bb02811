"""Which device and which number format a model runs in.

`auto` takes the checkpoint's own format where the device computes in it natively, and float32 elsewhere: a CPU without
bfloat16 units emulates bfloat16 about 300 times slower than it multiplies float32, and none runs float16 fast.

A CPU with bfloat16 units runs narrow models faster in float32 all the same, which has the kernels of native/ where
bfloat16 has torch's. CPU time in bfloat16 as a share of that in float32, Llamas with random weights on one core of a
Zen 4 (AVX512-BF16), least of three alternating runs on a busy machine:

    hidden size                          576    1024    2048    4096
    prompt, 512 tokens                  0.97    0.75    0.57    0.46
    a step of decoding, 1 request       2.07    1.47    1.27    1.19
                        8 requests      1.80    1.48    1.07    0.90
                        32              1.39    1.13    0.83    0.64

With prompts of 512 tokens and answers of 128, eight at a time, float32 takes 25 % less at 576 and 5 % less at 1024,
bfloat16 24 % less at 2048 and 39 % less at 4096: they meet in between. A bfloat16 model also takes half of the memory.
On AMX, which wasn't measured, bfloat16 has more to gain from prompts: --dtype bfloat16 asks for it at any size.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine_worker.model.errors import ModelError

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NARROW = 1536  # hidden sizes below this run faster in float32 on a CPU with bfloat16 units
_BF16_FLAGS = frozenset(["amx_bf16", "avx512_bf16", "bf16"])  # x86 and Arm, as /proc/cpuinfo spells them


def choose_device(requested: str) -> torch.device:
    """auto takes CUDA if there is one. Raises ModelError for a device that isn't there."""
    if requested == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ModelError(f"There is no device {requested!r}. Use auto, cpu or cuda.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError("This torch finds no CUDA device. Use --device cpu, or install a CUDA build of torch.")
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise ModelError(f"There is no {device}: this machine has {torch.cuda.device_count()} CUDA devices.")
    elif device.type != "cpu":
        raise ModelError(f"Device {requested!r} is not supported. Use auto, cpu or cuda.")
    return device


def choose_dtype(
    requested: str,
    checkpoint: torch.dtype | None,
    device: torch.device,
    *,
    hidden_size: int | None = None,
    cpu_bf16: bool | None = None,
) -> tuple[torch.dtype, str]:
    """The format to run in, and a warning line if it will be slow ("" if not).

    `checkpoint` is what the weights are stored in and `hidden_size` the model's, None if unknown. `cpu_bf16` overrides
    what the CPU is found to have.
    """
    has_bf16 = cpu_has_bf16() if cpu_bf16 is None else cpu_bf16
    if requested == "auto":
        stored = checkpoint if checkpoint in _NAMES.values() else torch.bfloat16 if checkpoint else torch.float32
        is_narrow = hidden_size is not None and hidden_size < _NARROW
        is_slow = stored == torch.float16 or (stored == torch.bfloat16 and (is_narrow or not has_bf16))
        if device.type == "cpu" and is_slow:
            return torch.float32, ""
        if stored == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            return torch.float16, ""
        return stored, ""
    if requested not in _NAMES:
        raise ModelError(f"There is no dtype {requested!r}. Use auto, float32, bfloat16 or float16.")
    dtype = _NAMES[requested]
    slow = device.type == "cpu" and (dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bf16))
    if slow:
        return (
            dtype,
            f"WARNING: this CPU has no {requested} units, so {requested} runs about 300 times slower than float32",
        )
    return dtype, ""


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Does this CPU multiply bfloat16 natively (AMX or AVX512-BF16 on x86, BF16 on Arm)?"""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return not _BF16_FLAGS.isdisjoint(value.split())
    return False


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
