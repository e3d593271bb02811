"""Finding, or building, the kernel library that suits this processor.

The source is plain C++ without torch or Python headers, compiled once for each instruction set. Which of the results is
loaded is decided here, by the flags that the processor reports, so a cache folder shared between machines never hands
one the other's code: the instruction set is part of the file's name, as is a digest of the source and of the compiler.

Looked for in this order: beside the source (`python -m engine_worker.model.native.build` puts it there, for images
without a compiler), in the cache folder, then compiled into the cache folder. WARMGATE_NATIVE chooses: auto, off, or
one instruction set (avx512, avx2, generic).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_worker.model.gguf_convert import cache_dir

CHOICE = "WARMGATE_NATIVE"
SOURCE = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / "lib"
BUILD_LIMIT_S = 300.0
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-w")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What the compiler is told, and what /proc/cpuinfo must list for the result to run."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]


INSTRUCTION_SETS = (  # best first
    InstructionSet(
        "avx512",
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"),
        frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma")),
    ),
    InstructionSet("avx2", ("-mavx2", "-mfma"), frozenset(("avx2", "fma"))),
)
# Runs anywhere and is slower than torch's own kernels: for tests, when asked for by name. More than -O1 takes two or
# three times as long to compile.
GENERIC = InstructionSet("generic", ("-O1",), frozenset())


class NativeUnavailable(Exception):
    """There is no library, and the message says why."""


def choose(choice: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> InstructionSet:
    """The best instruction set that this processor has, or the one that `choice` names. Raises NativeUnavailable."""
    choice = (choice or os.environ.get(CHOICE) or "auto").strip().lower()
    if choice == "off":
        raise NativeUnavailable(f"{CHOICE} is off")
    found = cpu_flags(cpuinfo)
    for candidate in (*INSTRUCTION_SETS, GENERIC):
        if choice == candidate.name:
            if not candidate.cpu_flags <= found:
                raise NativeUnavailable(f"{CHOICE} asks for {choice}, which this processor does not have")
            return candidate
        if choice == "auto" and candidate is not GENERIC and candidate.cpu_flags <= found:
            return candidate
    if choice != "auto":
        names = ", ".join(candidate.name for candidate in (*INSTRUCTION_SETS, GENERIC))
        raise NativeUnavailable(f"{CHOICE} is {choice!r}; it must be auto, off, or one of {names}")
    raise NativeUnavailable("there are no kernels for this processor, which has no AVX2")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What /proc/cpuinfo lists; nothing where it can't be read or on processors other than x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def find_or_build(
    isa: InstructionSet,
    progress: Callable[[str], None],
    cache: Path | None = None,
    limit_s: float = BUILD_LIMIT_S,
) -> Path:
    """The library's path. Compiles at most once a machine: others wait on a lock. Raises NativeUnavailable."""
    name = f"kernels-{source_digest()}-{isa.name}.so"
    shipped = SHIPPED / name
    if shipped.is_file():
        return shipped
    compiler = find_compiler()
    folder = (cache or cache_dir()) / "native"
    target = folder / name.replace(".so", f"-{_compiler_digest(compiler)}.so")
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{isa.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                progress(f"compiling the CPU kernels for {isa.name} (once, under a minute)")
                compile_library(compiler, isa, target, limit_s)
    except OSError as error:
        raise NativeUnavailable(f"the cache folder {folder} can't be used: {error.strerror}") from error
    return target


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, or the first one found. Raises NativeUnavailable."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return [path]
    raise NativeUnavailable("there is no C++ compiler; install g++ to have the fast CPU kernels")


def compile_library(compiler: list[str], isa: InstructionSet, target: Path, limit_s: float = BUILD_LIMIT_S) -> None:
    """Compile into a temporary file beside `target`, then rename. Raises NativeUnavailable, OSError."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    command = [*compiler, *_FLAGS, *isa.compiler_flags, str(SOURCE / "kernels.cpp"), "-o", temporary]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        if done.returncode != 0:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise NativeUnavailable(f"{compiler[0]} could not compile the kernels: {reason[:200]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{compiler[0]} took more than {limit_s:.0f} s for the kernels") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def source_digest() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(SOURCE.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_digest(compiler: list[str]) -> str:
    """So that an upgraded compiler, or another machine's, builds its own."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"the C++ compiler {compiler[0]} does not run") from error
    return hashlib.sha256(f"{platform.machine()} {done.stdout}".encode()).hexdigest()[:8]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile for every instruction set, into the package; or with --warm for this processor, into its cache folder.

    The exit code is 0 without a compiler, too: nothing needs the kernels.
    """
    parser = argparse.ArgumentParser(prog="python -m engine_worker.model.native.build", description=main.__doc__)
    parser.add_argument("--warm", action="store_true", help="only what this processor runs, into the cache folder")
    args = parser.parse_args(argv)
    try:
        if args.warm:
            find_or_build(choose(), print)
            return 0
        compiler = find_compiler()
        SHIPPED.mkdir(exist_ok=True)
        for isa in INSTRUCTION_SETS:
            compile_library(compiler, isa, SHIPPED / f"kernels-{source_digest()}-{isa.name}.so")
            print(f"kernels for {isa.name} are built")
    except (NativeUnavailable, OSError) as error:
        print(f"no CPU kernels: {error}; torch's own will be used", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
