"""The command line: what it hands on, and that a user's mistake is a sentence and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import UserError, _become, _setting_flags
from gateway.config import GatewaySettings
from tests.support.processes import free_port, python

NAMES = frozenset({"stream_idle_s", "drain_s", "secret", "policy"})


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, cwd=cwd, timeout=60
    )


class TestSettingFlags:
    def test_any_setting_is_a_flag_in_both_spellings(self) -> None:
        assert _setting_flags(["--stream-idle-s", "3", "--drain-s=0"], NAMES) == {"stream_idle_s": "3", "drain_s": "0"}

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--stream-idle", "3"], "no option --stream-idle; did you mean --stream-idle-s"),
            (["--zzz"], "no option --zzz; see warmgate serve --help"),
            (["policy"], "no option policy"),
            (["--drain-s"], "--drain-s needs a value"),
            (["--secret", "x"], "set WARMGATE_SECRET instead"),
        ],
    )
    def test_mistakes_are_named(self, arguments: list[str], sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            _setting_flags(arguments, NAMES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "there is no option --prot; did you mean --port?"),
        (["serve", "--replica", "foo"], "'foo' is not a replica URL"),
        (["serve", "--replica", "http://127.0.0.1:9", "--policy", "wram"], "warm"),
        (["serve", "--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["serve", "--replica", "http://127.0.0.1:9", "--drain-s", "soon"], "drain_s"),
        (["up", "--workers", "0"], "--workers"),
        (["up", "--bloc-size", "16"], "There is no option --bloc-size; did you mean --block-size?"),
        (["up", "--replica-slots", "3"], "--replica-slots is the gateway's: write replica_slots into a file"),
        (
            ["up", "--host", "0.0.0.0"],
            "make keys with `warmgate keys create` and name their --keys-file",
        ),
        (["up", "--keys-file", "/no/keys.json"], "there is no keys file /no/keys.json"),
        (["serve", "--replica", "http://127.0.0.1:9", "--keys-file", "/no/keys.json"], "there is no keys file"),
        (["up", "--model", "/nowhere/at/all"], "There is no model at /nowhere/at/all"),
    ],
)
def test_a_users_mistake_is_a_sentence(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_compiling_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway.compiled", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "WARMGATE_COMPILED=0" in done.stdout


def test_a_port_in_use_is_a_sentence_for_serve_too() -> None:
    port = free_port()
    with python("-m", "http.server", str(port), "--bind", "127.0.0.1") as server:
        server.until_http(f"http://127.0.0.1:{port}/")
        done = run("serve", "--replica", "http://127.0.0.1:9", "--port", str(port))
    assert done.returncode != 0
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_hands_over_all_its_arguments_and_its_exit_status(tmp_path: Path) -> None:
    package = tmp_path / "engine_worker"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    done = run("worker", "--model", "demo", "--port", "1", "--help", cwd=tmp_path)
    assert done.stdout.strip() == "['--model', 'demo', '--port', '1', '--help']"
    assert done.returncode == 7


def test_version_and_help() -> None:
    assert run("version").stdout.startswith("warmgate 0.")
    assert "cache-aware" in run("--help").stdout


def test_a_command_whose_packages_are_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.supervise import preflight

    monkeypatch.setitem(preflight.EXTRAS, "engine", ("torch_that_nobody_has",))
    with pytest.raises(UserError, match=r"A worker needs torch_that_nobody_has: .*pip install '\.\[engine\]'"):
        _become("engine_worker", [], "engine", "A worker")


@pytest.mark.parametrize("words", [["--request-timeout", "9"], ["--request-timeout-s=9"], ["--request-s", "9"]])
def test_the_longest_time_of_a_request_has_the_name_that_other_servers_give_it(words: list[str]) -> None:
    assert _setting_flags(words, frozenset(GatewaySettings.model_fields)) == {"request_s": "9"}
