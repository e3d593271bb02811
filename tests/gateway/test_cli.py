"""The command line: what it hands on, and that a user's mistake is a sentence and never a traceback."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gateway.cli import UserError, _become, _setting_flags, app
from gateway.config import GatewaySettings
from gateway.config_words import unknown_variables
from gateway.supervise.plan import UpOptions
from tests.support.processes import ROOT, free_port, python

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
        (["up", "--polcy", "warm"], "There is no option --polcy; did you mean --policy?"),
        (["up", "--policy", "wram"], "wram"),
        (["up", "--dtype", "x"], "The worker can't start: argument --dtype"),
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


def test_the_options_of_up_are_known_to_its_checks() -> None:
    from gateway.supervise.preflight import OWN_FLAGS

    [up] = [each for each in typer.main.get_command(app).commands.values() if each.name == "up"]  # type: ignore[attr-defined]
    assert {name for param in up.params for name in param.opts} == set(OWN_FLAGS)


def test_advise_says_in_a_sentence_that_somebody_else_answers() -> None:
    port = free_port()
    with python("-m", "http.server", str(port), "--bind", "127.0.0.1") as server:
        server.until_http(f"http://127.0.0.1:{port}/")
        done = run("advise", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "gives no advice (it answered 404): is a gateway running there?" in line


class _Guarded(BaseHTTPRequestHandler):
    """Tells its advice to whoever has the secret, and to nobody under another path."""

    def do_GET(self) -> None:
        known = self.headers.get("x-warmgate-secret") == "s3cret"
        status = 404 if self.path != "/advice" else 200 if known else 401
        body = json.dumps({"sentences": ["Stay with warm."]}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def guarded() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Guarded)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("address", ["http://{}", "http://{}/", "http://{}/v1", "{}", "{}/v1/"])
def test_advise_sends_the_secret_to_any_spelling_of_the_address(
    guarded: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMGATE_SECRET", "s3cret")
    told = CliRunner().invoke(app, ["advise", "--url", address.format(guarded)])
    assert (told.exit_code, told.stdout) == (0, "Stay with warm.\n")


@pytest.mark.parametrize(("secret", "words"), [("", "wants the secret"), ("other", "has another secret")])
def test_advise_that_is_refused_says_what_to_set(
    guarded: str, secret: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMGATE_SECRET", secret)
    told = CliRunner().invoke(app, ["advise", "--url", guarded])
    assert isinstance(told.exception, UserError)
    assert words in str(told.exception)
    assert "set WARMGATE_SECRET as the gateway has it" in str(told.exception)


def test_a_second_signal_ends_serve_at_once_and_without_a_traceback() -> None:
    """The first waits for balancers here, so that there is time for the second."""
    port = free_port()
    command = ("-m", "gateway.cli", "serve", "--replica", "http://127.0.0.1:9", "--port", str(port))
    with python(*command, "--unready-s", "600") as serving:
        serving.until_http(f"http://127.0.0.1:{port}/health")
        serving.send(signal.SIGTERM)
        serving.until_http(f"http://127.0.0.1:{port}/ready", 503)
        serving.send(signal.SIGTERM)
        assert serving.until_exit() == 0
        assert "Traceback" not in serving.output
        assert "ERROR" not in serving.output


def test_a_misspelt_variable_is_warned_of() -> None:
    port = free_port()
    command = ("-m", "gateway.cli", "serve", "--replica", "http://127.0.0.1:9", "--port", str(port))
    with python(*command, env={"WARMGATE_STREM_IDLE_S": "3", "WARMGATE_COMPILED": "0"}) as serving:
        serving.until_http(f"http://127.0.0.1:{port}/health")
        sentence = "nothing reads the variable WARMGATE_STREM_IDLE_S; did you mean WARMGATE_STREAM_IDLE_S?"
        assert sentence in serving.output
        assert serving.output.count("nothing reads") == 1
        assert "1 replica, not compiled (WARMGATE_COMPILED=0 forbids it)" in serving.output


def test_every_variable_of_the_project_is_known() -> None:
    """All that anything here names: code of gateway and worker, Makefile, containers, documents."""
    names: set[str] = set()
    places = ("gateway", "policies", "engine_worker", "loadtest", "docs", "deploy", "tests/fuzz")
    files = [path for place in places for path in (ROOT / place).rglob("*") if path.is_file()]
    for path in (*files, ROOT / "Makefile", ROOT / "docker-compose.yml", ROOT / "README.md"):
        names |= set(re.findall(r"WARMGATE_[A-Z0-9_]*[A-Z0-9]", path.read_text("utf-8", "ignore")))
    assert len(names) >= 15
    assert unknown_variables(dict.fromkeys(names, ""), GatewaySettings.model_fields) == []


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
    flag = run("--version")
    assert (flag.returncode, flag.stdout) == (0, run("version").stdout)
    assert "cache-aware" in run("--help").stdout


def test_a_command_whose_packages_are_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.supervise import preflight

    monkeypatch.setitem(preflight.EXTRAS, "engine", ("torch_that_nobody_has",))
    with pytest.raises(UserError, match=r"A worker needs torch_that_nobody_has: .*pip install '\.\[engine\]'"):
        _become("engine_worker", [], "engine", "A worker")


@pytest.mark.parametrize("words", [["--request-timeout", "9"], ["--request-timeout-s=9"], ["--request-s", "9"]])
def test_the_longest_time_of_a_request_has_the_name_that_other_servers_give_it(words: list[str]) -> None:
    assert _setting_flags(words, frozenset(GatewaySettings.model_fields)) == {"request_s": "9"}


def test_up_passes_on_what_is_needed_to_ask_whether_another_policy_would_pay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[UpOptions] = []
    monkeypatch.setattr("gateway.supervise.run.up", lambda options: given.append(options) or 0)
    path = str(tmp_path / "mine.jsonl")
    done = CliRunner().invoke(app, ["up", "--shadow-policies", "warm,sticky", "--record-trace", path, "--dtype", "x"])
    assert done.exit_code == 0, done.output
    assert given[0].gateway_settings == {"shadow_policies": "warm,sticky", "record_trace": path}
    assert given[0].worker_args == ("--dtype", "x")
