"""The modules that every request runs through most, compiled to C by mypyc where somebody has asked for it.

Theory. What routing and bookkeeping do for one request is some hundreds of small steps over typed objects, which an
interpreter spends most of its time looking up. mypyc compiles the very same files, with the types that mypy has
checked, and the program stays what the files say. So there is one source and two ways to run it: as Python (always
there, what tests and debuggers see) and compiled, by

    python -m gateway.compiled            build into the cache folder: once for each state of the sources
    WARMGATE_COMPILED=0 warmgate serve    run without
    python -m gateway.compiled --run loadtest.bench_index
                                          run another module on the build

A build is named by the digest of the sources that it was made of, so an edited file is never shadowed by a stale
library: the server then runs as Python until the next build. Nothing is compiled while serving.

`activate` must come before the first import of any of the modules, since they refer to each other's C structures:
either all of them are compiled or none.

What is gained depends on how a module is written. Constants marked `Final` are known when it is compiled; others are
looked up in the module's dict. Classes with an initializer of their own are C structures, fields and all; what a
decorator or a base class of somebody else's makes (a frozen dataclass, a NamedTuple) stays as slow as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "policies.types",
    "policies.events",
    "policies.block_runs",
    "policies.mirror",
    "policies.prefix_index",
    "policies.retouch",
    "policies.usual",
    "policies.cost",
    "policies.lease",
    "policies.work_clock",
    "policies.load",
    "policies.rate_book",
    "policies.replica",
    "policies.fleet_config",
    "policies.fleet",
    "policies.decide",
    "policies.warm",
    "policies.fair",
    "gateway.prefix.keys",
    "gateway.prefix.canonical",
    "gateway.prefix.tokenize",
    "gateway.prefix.words",
    "gateway.prefix.pieces",
    "gateway.prefix.reading",
    "gateway.prefix.turns",
    "gateway.prefix.known",
    "gateway.observe.histogram",
    "gateway.tenancy.limits",
    "gateway.tenancy.refusals",
    "gateway.admission",
    "gateway.tenancy.estimate",
    "gateway.tenancy.service",
    "gateway.router",
    "gateway.replicas.gate",
    "gateway.prefix.service",
    "gateway.known_head",
    "gateway.answer_head",
    "gateway.heads",
    "gateway.upstream_types",
    "gateway.upstream_connection",
    "gateway.upstream_pool",
    "gateway.upstream",
    "gateway.exchange",
    "gateway.outcome",
    "gateway.aliases",
    "gateway.tenancy.salt",
    "gateway.tenancy.directory",
    "gateway.tenancy.figures",
    "gateway.replicas.room",
    "gateway.replicas.registry",
    "gateway.prefix.vocabulary",
    "gateway.observe.metrics",
    "gateway.openai.parse",
    "gateway.guard",
    "gateway.quarantine",
    "gateway.intake",
    "gateway.straight",
    "gateway.straight_run",
    "gateway.openai.sse",
    "gateway.openai.marks",
    "gateway.joining",
    "gateway.pump",
)
VARIABLE = "WARMGATE_COMPILED"
_NO = ("0", "false", "no", "off")
_BUILD_LIMIT_S = 900.0
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
_SETUP = """
import sys
from setuptools import setup
from mypyc.build import mypycify
target, *files = sys.argv[1:]
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", target + "/lib", "--build-temp", target + "/temp"]
options = ["--strict", "--cache-dir", target + "/mypy"]
extensions = mypycify([*options, *files], opt_level="2", debug_level="0", target_dir=target + "/c")
setup(name="warmgate-compiled", packages=[], ext_modules=extensions)
"""


class CannotBuild(Exception):
    """The message is one sentence that says what is missing."""


def source(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def digest() -> str:
    """Names what the modules are now, and which interpreter could load them compiled."""
    found = hashlib.sha256(f"{sys.implementation.cache_tag} {platform.machine()} {_SETUP}".encode())
    for module in MODULES:
        found.update(module.encode() + b"\0" + source(module).read_bytes())
    return found.hexdigest()[:16]


def folder(cache: Path | None = None) -> Path:
    """Where the build of the sources as they are is, or would be. Raises CannotBuild where there is no place for it."""
    if cache is None:
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmgate"
        except RuntimeError:
            raise CannotBuild("this user has no home folder for a cache; set XDG_CACHE_HOME") from None
    return cache / "compiled" / digest()


def is_active() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def is_forbidden() -> bool:
    return os.environ.get(VARIABLE, "").lower() in _NO


def state() -> str:
    """How the modules run, in words for the log, and what would make them faster."""
    if is_active():
        return "compiled"
    if is_forbidden():
        return f"not compiled ({VARIABLE}={os.environ[VARIABLE]} forbids it)"
    return "not compiled (python -m gateway.compiled makes it faster)"


def activate(cache: Path | None = None) -> bool:
    """Import the modules compiled from now on, if there is a build of them and nobody forbids it. Never raises for a
    build that is missing; whether they are compiled is the answer."""
    if is_active():
        return True
    if is_forbidden() or any(module in sys.modules for module in MODULES):
        return False
    try:
        where = folder(cache)
        files = {path.name.removesuffix(_SUFFIX): path for path in where.iterdir()}
    except (OSError, CannotBuild):
        return False
    if not files.keys() >= set(MODULES):
        return False
    try:
        _check(where, files)
    except OSError as error:
        print(f"warmgate: the compiled modules in {where} are not used: {error}.", file=sys.stderr)
        return False
    sys.meta_path.insert(0, _Finder(files))
    return True


def _check(where: Path, files: dict[str, Path]) -> None:
    """Raises OSError for libraries that others may have put there, or that this system can't load (made on another one,
    or cut off): their import would fail in the midst of the others."""
    found = where.stat()
    if found.st_uid not in (0, os.getuid()) or found.st_mode & stat.S_IWOTH:
        raise OSError("others may write there")
    for library in files.values():
        ctypes.CDLL(str(library))


class _Finder(MetaPathFinder):
    """Finds the modules by their libraries, and the one library that these share."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        library = self._files.get(fullname)
        return None if library is None else importlib.util.spec_from_file_location(fullname, library)


def build(cache: Path | None = None) -> Path:
    """Compile, unless it has been done. Returns the folder. Raises CannotBuild."""
    target = folder(cache)
    if target.is_dir():
        return target
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        raise CannotBuild("mypy and setuptools are not installed; pip install mypy setuptools")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            _compile(Path(work))
            ready = Path(work) / "ready"
            ready.mkdir()
            for library in (Path(work) / "lib").rglob(f"*{_SUFFIX}"):
                name = ".".join(library.relative_to(Path(work) / "lib").parts)
                shutil.copy(library, ready / name)
            with contextlib.suppress(OSError):  # another process was faster: its build is as good
                os.rename(ready, target)
    except OSError as error:
        raise CannotBuild(f"the cache folder {target.parent} can't be used: {error.strerror}") from error
    return target


def _compile(work: Path) -> None:
    files = [str(source(module).relative_to(ROOT)) for module in MODULES]
    command = [sys.executable, "-c", _SETUP, str(work), *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"compiling took more than {_BUILD_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).splitlines()
        reason = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no reason given")
        raise CannotBuild(f"mypyc could not compile them: {reason[:300]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gateway.compiled",
        description="Compile the modules that every request runs through most to C, into the cache folder (takes about "
        "one to two minutes). `warmgate serve` uses the build while it is one of exactly these sources.",
        epilog=f"{VARIABLE}=0 makes a gateway run without.",
    )
    parser.add_argument(
        "--run", nargs=argparse.REMAINDER, metavar="MODULE ...", help="then run this module with its arguments on them"
    )
    told = parser.parse_args(argv).run
    try:
        if not folder().is_dir():
            print("compiling the gateway's busiest modules, which takes a minute or two ...", file=sys.stderr)
        where = build()
    except CannotBuild as error:
        print(f"warmgate: the gateway runs as plain Python: {error}.", file=sys.stderr)
        return 1
    print(f"compiled modules in {where}", flush=True)
    if told:
        if not activate():
            print(f"warmgate: the build is not used ({state()}).", file=sys.stderr)
            return 1
        sys.argv = told
        runpy.run_module(told[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
