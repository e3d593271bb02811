"""The supervisor: the machine against a clock made of numbers, and the driver with real small processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config import GatewaySettings
from gateway.supervise import plan, preflight
from gateway.supervise.machine import RUNNING, AllReady, ChildState, RestartRules, Role, Say, Signal, Start, Supervisor
from gateway.supervise.plan import UpOptions
from gateway.supervise.screen import ready_message
from tests.support.processes import ROOT, Process, free_port, free_ports, process_exists, python

FLEET = [("worker-1", Role.WORKER), ("worker-2", Role.WORKER), ("gateway", Role.GATEWAY)]
RULES = RestartRules(first_delay_s=1, max_delay_s=8, max_failures=4, stable_s=60, grace_s=10)


def ready_fleet() -> Supervisor:
    machine = Supervisor(FLEET, RULES)
    assert machine.poll(0) == [Start(name) for name, _ in FLEET]
    assert machine.child_ready("gateway", 1) == []
    assert machine.child_ready("worker-1", 2) == []
    assert machine.child_ready("worker-2", 3) == [AllReady()]
    return machine


def sentences(actions: list) -> str:
    return " ".join(action.text for action in actions if isinstance(action, Say))


class TestMachine:
    def test_a_killed_child_is_started_again_after_a_delay_that_doubles_up_to_a_limit(self) -> None:
        machine, now, delays = ready_fleet(), 10.0, []
        for _ in range(3):
            machine.child_exited("worker-1", -9, now)
            due = machine.next_due()
            assert due is not None
            assert machine.poll(due - 0.01) == []
            assert machine.poll(due) == [Start("worker-1")]
            delays.append(due - now)
            now = due + 0.1
        assert delays == [1, 2, 4]
        assert [RULES.delay_s(n) for n in (4, 5, 6)] == [8, 8, 8]

    def test_a_long_healthy_life_forgets_earlier_deaths(self) -> None:
        machine = ready_fleet()
        machine.child_exited("worker-1", -9, 10)
        machine.poll(11)
        assert "back in service" in sentences(machine.child_ready("worker-1", 12))
        machine.child_exited("worker-1", -9, 12 + RULES.stable_s)
        assert machine.children["worker-1"].num_failures == 1

    def test_a_worker_that_keeps_dying_is_left_down_and_the_others_go_on(self) -> None:
        machine, now = ready_fleet(), 10.0
        for _ in range(RULES.max_failures - 1):
            machine.child_exited("worker-1", 3, now)
            now = machine.next_due() or now
            machine.poll(now)
        said = sentences(machine.child_exited("worker-1", 3, now, "no such device"))
        assert "worker-1 exited with status 3 4 times in a row" in said
        assert "no such device" in said
        assert machine.children["worker-1"].state is ChildState.LOST
        assert not machine.stopping
        assert machine.next_due() is None

    def test_losing_the_last_worker_or_the_gateway_stops_everything(self) -> None:
        for names in (["worker-1", "worker-2"], ["gateway"]):
            machine, now = ready_fleet(), 10.0
            for name in names:
                for _ in range(RULES.max_failures):
                    machine.child_exited(name, -11, now)
                    now = machine.next_due() or now
                    machine.poll(now)
            assert machine.stopping
            for name, child in machine.children.items():
                if child.state in RUNNING:
                    machine.child_exited(name, 0, now)
            assert machine.exit_code == 1
            assert "SIGSEGV" in (machine.failure or "")

    def test_a_child_that_exits_by_itself_while_starting_stops_all_with_its_own_words(self) -> None:
        machine = Supervisor(FLEET, RULES)
        machine.poll(0)
        actions = machine.child_exited("worker-2", 1, 1, "There is no model at /nowhere.")
        assert actions == [Signal("worker-1", signal.SIGTERM), Signal("gateway", signal.SIGTERM)]
        assert machine.failure == "worker-2 exited with status 1: There is no model at /nowhere."

    def test_a_child_killed_while_starting_gets_another_chance_and_a_word_about_memory(self) -> None:
        machine = Supervisor(FLEET, RULES)
        machine.poll(0)
        said = sentences(machine.child_exited("worker-1", -9, 1))
        assert "out of memory" in said
        assert not machine.stopping

    def test_stop_asks_first_and_kills_after_the_grace_only_what_is_left(self) -> None:
        machine = ready_fleet()
        assert set(machine.stop(20)) == {Signal(name, signal.SIGTERM) for name, _ in FLEET}
        machine.child_exited("worker-1", 0, 21)
        machine.child_exited("gateway", 0, 21)
        assert machine.next_due() == 30
        assert machine.poll(29.9) == []
        assert Signal("worker-2", signal.SIGKILL) in machine.poll(30)
        assert machine.exit_code is None
        machine.child_exited("worker-2", -9, 30)
        assert machine.exit_code == 0

    def test_asked_twice_it_kills_at_once(self) -> None:
        machine = ready_fleet()
        machine.stop(20)
        assert [a for a in machine.stop(20.5) if isinstance(a, Signal)] == [
            Signal(name, signal.SIGKILL) for name, _ in FLEET
        ]
        assert machine.stop(20.6) == []

    def test_a_child_waiting_for_its_restart_is_not_started_by_a_stop(self) -> None:
        machine = ready_fleet()
        machine.child_exited("worker-1", -9, 10)
        machine.stop(10.5)
        assert machine.poll(100) != []  # the others are forced
        assert machine.children["worker-1"].state is ChildState.STOPPED


class SupervisorMachine(RuleBasedStateMachine):
    """Any order of deaths, readiness and stops: no child is started twice, and a stop always ends."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Supervisor(FLEET, RULES)
        self.now = 0.0
        self.alive: set[str] = set()

    def carry_out(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert action.name not in self.alive, "started twice"
                self.alive.add(action.name)
            if isinstance(action, Signal):
                assert action.name in self.alive, "signalled the dead"

    @rule(step=st.floats(0, 100))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.carry_out(self.machine.poll(self.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), status=st.sampled_from([0, 1, -9, -11]))
    def one_dies(self, data: st.DataObject, status: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        self.carry_out(self.machine.child_exited(name, status, self.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def one_is_ready(self, data: st.DataObject) -> None:
        self.carry_out(self.machine.child_ready(data.draw(st.sampled_from(sorted(self.alive))), self.now))

    @rule()
    def stop(self) -> None:
        self.carry_out(self.machine.stop(self.now))

    @invariant()
    def holds(self) -> None:
        self.machine.check_invariants()
        running = {name for name, child in self.machine.children.items() if child.state in RUNNING}
        assert running == self.alive
        if self.machine.stopping and not self.alive:
            assert self.machine.exit_code is not None


TestAnyOrder = SupervisorMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def start(stories: dict[str, str], folder: Path = Path("/nonexistent")) -> Process:
    return python("-m", "tests.support.fake_up", json.dumps(stories), str(free_ports(len(stories))), str(folder))


class TestDriver:
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
    def test_prints_how_to_call_it_when_all_are_ready_and_stops_cleanly_when_asked(self, how: signal.Signals) -> None:
        with start({"worker-1": "serve", "worker-2": "serve", "gateway": "serve"}) as up:
            up.until_output("Ctrl-C stops everything")
            assert "[ready] all well" in up.output
            up.send(how)
            assert up.until_exit() == 0

    def test_a_missing_model_ends_it_with_the_workers_sentence_last(self) -> None:
        with start({"worker-1": "exit:1:There is no model at /nowhere.", "gateway": "serve"}) as up:
            assert up.until_exit() == 1
            assert up.output.splitlines()[-1] == "worker-1 exited with status 1: There is no model at /nowhere."
            assert "Traceback" not in up.output

    def test_a_worker_that_reports_failure_ends_it(self) -> None:
        with start({"worker-1": "failed:The model needs 9 GB.", "gateway": "serve"}) as up:
            assert up.until_exit() == 1
            assert up.output.splitlines()[-1] == "worker-1 can't start: The model needs 9 GB."

    def test_a_killed_child_comes_back(self, tmp_path: Path) -> None:
        with start({"worker-1": "dies-first:2", "gateway": "serve"}, tmp_path) as up:
            up.until_output("Ctrl-C stops everything")
            assert up.output.count("worker-1 was killed by SIGKILL; starting it again") == 2

    def test_a_crash_loop_is_given_up_with_a_sentence(self) -> None:
        with start({"worker-1": "kill-self", "gateway": "serve"}) as up:
            assert up.until_exit() == 1
            assert "worker-1 was killed by SIGKILL 3 times in a row" in up.output.splitlines()[-1]

    def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(self) -> None:
        with start({"worker-1": "deaf", "gateway": "serve"}) as up:
            up.until_output("Ctrl-C stops everything")
            up.send(signal.SIGTERM)
            assert up.until_exit() == 0
            assert "worker-1 did not stop in time; killing it" in up.output

    def test_what_a_dead_worker_left_behind_is_killed_with_it(self, tmp_path: Path) -> None:
        with start({"worker-1": "forks", "gateway": "serve"}, tmp_path) as up:
            up.until_output("Ctrl-C stops everything")
            first = int((tmp_path / "worker-1").read_text())
            parent = int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{first}/status").read_text())[1])  # type: ignore[index]
            os.kill(parent, signal.SIGKILL)
            up.until_output("worker-1 is back in service")
            assert not process_exists(first)

    def test_children_die_with_a_killed_supervisor(self, tmp_path: Path) -> None:
        with start({"worker-1": "serve", "worker-2": "deaf", "gateway": "serve"}) as up:
            up.until_output("Ctrl-C stops everything")
            children = [int(p) for p in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()]
            assert len(children) == 3
            up.send(signal.SIGKILL)
            up.until_exit()
            up.until("the children are gone", lambda: not any(map(process_exists, children)), alive=False)


class TestPreflight:
    def test_a_port_in_use_is_named_with_the_flag_that_moves_it(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(preflight.CannotStart, match=rf"Port {port} on 127.0.0.1 .*--port"):
                preflight.check_ports(UpOptions(port=port, worker_port=free_ports(2)))
            with pytest.raises(preflight.CannotStart, match=rf"Port {port} .*--worker-port"):
                preflight.check_ports(UpOptions(port=free_port(), worker_port=port, num_workers=1))

    def test_make_is_told_how_to_pass_the_flag_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert re.search(r"^\t@WARMGATE_MAKE=1 exec .*warmgate up \$\(UP\)$", (ROOT / "Makefile").read_text(), re.M)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            options = UpOptions(port=port, worker_port=free_ports(2))
            monkeypatch.setenv("WARMGATE_MAKE", "1")
            with pytest.raises(preflight.CannotStart, match=r"another with --port, as in make up UP='--port \d+'\.$"):
                preflight.check_ports(options)
            monkeypatch.delenv("WARMGATE_MAKE")
            with pytest.raises(preflight.CannotStart, match=r"another with --port\.$"):
                preflight.check_ports(options)

    def test_overlapping_ports_and_no_ports_are_refused(self) -> None:
        with pytest.raises(preflight.CannotStart, match="share port 8102"):
            preflight.check_ports(UpOptions(port=8102, worker_port=8101))
        with pytest.raises(preflight.CannotStart, match="70000 is no port"):
            preflight.check_ports(UpOptions(port=free_port(), worker_port=70_000, num_workers=1))

    @pytest.mark.parametrize("model", ["/nowhere/model", "./nothing.gguf", "nothing.gguf", "a/b/c"])
    def test_a_path_that_is_not_there_is_named(self, model: str) -> None:
        with pytest.raises(preflight.CannotStart, match=r"There is no model at .*--model"):
            preflight.check_model(model)

    def test_a_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(preflight.CannotStart, match=r"no config\.json"):
            preflight.check_model(str(tmp_path))

    def test_the_file_says_what_no_flag_does(self, tmp_path: Path) -> None:
        config = tmp_path / "gateway.yaml"
        config.write_text("policy: least_loaded\nport: 9005\n")
        settings = preflight.settings_of({"host": None, "port": 9006, "policy": None}, config)
        assert (settings.host, settings.port, settings.policy) == ("127.0.0.1", 9006, "least_loaded")

    def test_replicas_of_the_file_are_refused_not_dropped(self, tmp_path: Path) -> None:
        config = tmp_path / "gateway.yaml"
        config.write_text("replicas: [http://127.0.0.1:9001]\n")
        with pytest.raises(preflight.CannotStart, match=r"http://127.0.0.1:9001.*warmgate serve"):
            preflight.settings_of({}, config)
        with pytest.raises(preflight.CannotStart, match="--replica is warmgate serve's"):
            preflight.check_worker_flags(["--replica", "http://127.0.0.1:9001"], frozenset())

    def test_a_hub_id_is_left_to_the_worker(self) -> None:
        preflight.check_model("HuggingFaceTB/SmolLM2-135M-Instruct")


class TestPlan:
    def test_every_worker_knows_how_many_share_the_machine_and_the_gateway_knows_them_all(self) -> None:
        *workers, gateway = plan.children(UpOptions(num_workers=2, worker_args=("--dtype", "float32")))
        for index, worker in enumerate(workers):
            command = " ".join(worker.command)
            assert f"--port {8101 + index}" in command
            assert command.endswith("--dtype float32")
            assert worker.env["WARMGATE_WORKERS_ON_MACHINE"] == "2"
        assert "--replica http://127.0.0.1:8101 --replica http://127.0.0.1:8102" in " ".join(gateway.command)

    def test_settings_of_the_gateway_go_to_it_alone(self) -> None:
        *workers, gateway = plan.children(UpOptions(num_workers=2, gateway_settings={"keys_file": "keys.json"}))
        assert gateway.command[-2:] == ("--keys-file", "keys.json")
        assert not any("--keys-file" in worker.command for worker in workers)

    @pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")])
    def test_a_wildcard_address_is_called_on_loopback(self, host: str, url: str) -> None:
        assert plan.children(UpOptions(host=host, port=1))[-1].url == url


def test_with_keys_the_printed_lines_carry_one_and_say_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["warmgate"])
    options = UpOptions(gateway_settings={"keys_file": str(tmp_path / "the keys.json")})
    make_key = preflight.key_command(preflight.gateway_settings(options))
    message = ready_message("http://127.0.0.1:8000", "demo", 1, "warm", make_key)
    assert "(model demo, 1 worker, policy warm)" in message
    [export] = [line for line in message.splitlines() if line.startswith("export ")]
    command = shlex.split(export.removeprefix("export KEY=$(").removesuffix(")"))
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0
    assert (tmp_path / "the keys.json").exists()
    [curl] = [line for line in message.splitlines() if line.startswith("curl ")]
    assert ' -H "Authorization: Bearer $KEY"' in curl
    snippet = message[message.index("import os") : message.index("\n\nCtrl-C")]
    compile(snippet, "snippet", "exec")
    assert 'api_key=os.environ["KEY"]' in snippet


def test_keys_in_redis_are_made_there_and_without_keys_nothing_is_made() -> None:
    shared = GatewaySettings(keys_redis=True, redis_url="redis://127.0.0.1:1", fleet="blue")
    assert preflight.key_command(shared).endswith("keys create --tenant me --keys-redis --fleet blue")
    assert preflight.key_command(GatewaySettings()) == ""
    assert "KEY" not in ready_message("http://127.0.0.1:8000", "demo", 2, "warm")


def test_the_printed_snippet_is_python_and_the_curl_line_is_one_line() -> None:
    message = ready_message("http://127.0.0.1:8000", "o'model", 2, "warm")
    snippet = message[message.index("from openai") : message.index("\n\nCtrl-C")]
    compile(snippet, "snippet", "exec")
    [curl] = [line for line in message.splitlines() if line.startswith("curl ")]
    assert json.loads(shlex.split(curl)[-1])["model"] == "o'model"
