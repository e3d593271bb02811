"""The routing heart compiled: found only where it is a build of the sources as they are, and the same program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import compiled

# What a mistake in a compiled module would show in: state machines against their invariants and models, decisions.
TESTS = (
    "policies/test_fair.py",
    "policies/test_fleet.py",
    "policies/test_fleet_model.py",
    "policies/test_prefix_index_model.py",
    "policies/test_cost.py",
    "policies/test_policies.py",
    "policies/test_warm_config.py",
    "policies/test_warm_queue.py",
    "policies/test_work_clock.py",
    "gateway/test_admission.py",
    "gateway/test_gate.py",
    "gateway/test_router.py",
    "gateway/test_guard.py",
    "gateway/test_joining.py",
    "gateway/test_known_head.py",
    "gateway/test_marks.py",
    "gateway/test_parse.py",
    "gateway/test_sse.py",
    "gateway/test_straight.py",
    "gateway/test_upstream.py",
    "gateway/prefix/test_keys.py",
    "gateway/prefix/test_known.py",
    "gateway/prefix/test_turns.py",
    "gateway/prefix/test_service.py",
    "gateway/tenancy/test_limits.py",
    "gateway/tenancy/test_live.py",
)
RUN = """
import sys
from gateway import compiled
assert compiled.activate(), "the modules were imported before"
import policies.fleet
assert policies.fleet.__file__.endswith(".so"), policies.fleet.__file__
import pytest
sys.exit(pytest.main(["-q", *sys.argv[1:]]))
"""


LIMIT_S = 280
SUITE_LIMIT_S = 1200  # a thousand tests, on a busy machine


def run(code: str, *arguments: str, limit_s: float = LIMIT_S, **env: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", code, *arguments], {**os.environ, **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=limit_s)


def test_without_a_build_it_runs_as_python(tmp_path: Path) -> None:
    code = "from gateway import compiled\nprint(compiled.activate())\nimport policies.fleet as it\nprint(it.__file__)"
    answer = run(code, XDG_CACHE_HOME=str(tmp_path)).stdout.split()
    assert answer[0] == "False"
    assert answer[1].endswith(".py")


@pytest.mark.parametrize("value", ["0", "false", "off"])
def test_a_build_can_be_switched_off(value: str) -> None:
    code = "from gateway import compiled; compiled.folder = None; print(compiled.activate())"
    assert run(code, WARMGATE_COMPILED=value).stdout == "False\n"


def test_the_log_says_what_would_make_it_faster(tmp_path: Path) -> None:
    code = "from gateway import compiled; compiled.activate(); print(compiled.state())"
    plain = run(code, WARMGATE_COMPILED="", XDG_CACHE_HOME=str(tmp_path)).stdout
    assert plain == "not compiled (python -m gateway.compiled makes it faster)\n"
    forbidden = run(code, WARMGATE_COMPILED="off", XDG_CACHE_HOME=str(tmp_path)).stdout
    assert forbidden == "not compiled (WARMGATE_COMPILED=off forbids it)\n"


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_build_that_cannot_be_loaded_or_trusted_is_none(tmp_path: Path, mode: int) -> None:
    """Made on another system, cut off, or where anybody may put one."""
    folder = compiled.folder(tmp_path / "warmgate")
    folder.mkdir(parents=True)
    for module in compiled.MODULES:
        (folder / f"{module}{compiled._SUFFIX}").write_bytes(b"")
    folder.chmod(mode)
    code = "from gateway import compiled\nprint(compiled.activate())\nimport policies.fleet as it\nprint(it.__file__)"
    done = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.split()[:1] == ["False"]
    assert done.stdout.split()[1].endswith(".py")
    assert str(folder) in done.stderr


def test_without_a_home_there_is_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(compiled.CannotBuild, match="XDG_CACHE_HOME"):
        compiled.build()
    code = "import os, pwd\nfrom pathlib import Path\nfrom gateway import compiled\n"
    code += "def homeless(): raise RuntimeError\nPath.home = homeless\nos.environ.pop('XDG_CACHE_HOME', None)\n"
    assert run(code + "print(compiled.activate())").stdout == "False\n"


def test_another_module_runs_on_the_build() -> None:
    if not compiled.folder().is_dir():
        pytest.skip("there is no build of these sources: python -m gateway.compiled")
    small = ("--replicas", "2", "--blocks", "400", "--prompt-tokens", "1600", "--requests", "3")
    command = (sys.executable, "-m", "gateway.compiled", "--run", "loadtest.bench_index", *small)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert "us: min, p50, p99; compiled" in done.stdout
    assert done.stdout.splitlines()[-1].split()[0] == "2"


def test_modules_that_are_imported_already_stay_what_they_are() -> None:
    code = "import policies.types\nfrom gateway import compiled\nprint(compiled.activate())"
    assert run(code, WARMGATE_COMPILED="1").stdout == "False\n"


def test_an_edited_source_has_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.digest()
    for module in compiled.MODULES:
        copy = tmp_path / compiled.source(module).relative_to(compiled.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(compiled.source(module).read_bytes())
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    assert compiled.digest() == before
    compiled.source("policies.warm").write_text("# edited\n")
    assert compiled.digest() != before


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(compiled, "MODULES", ("policies.fleet_config",))
    with pytest.raises(compiled.CannotBuild, match="no-such-compiler"):
        compiled.build(tmp_path)
    assert not any(path for path in (tmp_path / "compiled").iterdir() if path.is_file())


@pytest.mark.timeout(SUITE_LIMIT_S + 20)
def test_compiled_modules_pass_their_tests() -> None:
    """`make test` builds them first where it can."""
    if not compiled.folder().is_dir():
        pytest.skip("there is no build of these sources: python -m gateway.compiled")
    folder = compiled.ROOT / "tests"
    done = run(RUN, *(str(folder / name) for name in TESTS), limit_s=SUITE_LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
