"""The compose file and what its containers run: parsed strictly, then the very commands and settings, started here.

Docker's engine isn't needed. What a container gets (command, environment, health check) is read out of the files; only
hosts and ports are moved, since every container has a network address of its own and this machine has one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from compose_spec import PyCompose
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import LOAD_LIMIT_S
from tests.e2e.dockerfile import compose_text, image_of, moved, read_compose
from tests.support.processes import ROOT, Process, free_ports

COMPOSE = read_compose()
SERVICES: Mapping[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
DASHBOARD = ROOT / "deploy/grafana/dashboards/warmgate.json"


class TestFiles:
    def test_the_compose_file_follows_the_specification(self) -> None:
        parsed = PyCompose.from_yaml(compose_text())
        assert set(parsed.service_names()) == {
            *("gateway", "worker-1", "worker-2", "redis", "prometheus", "grafana"),
        }

    def test_the_parser_would_see_a_mistake(self) -> None:
        text = compose_text().replace("stop_grace_period", "stop_grace", 1)
        with pytest.raises(ValueError, match="stop_grace"):
            PyCompose.from_yaml(text)

    @pytest.mark.skipif(
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
        reason="no docker compose here",
    )
    def test_docker_compose_accepts_it(self) -> None:
        subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, check=True)

    @pytest.mark.parametrize("name", OURS)
    def test_images_run_as_nobody_special_and_check_their_health(self, name: str) -> None:
        image = image_of(SERVICES[name])
        assert image.user not in ("root", "0")
        assert image.healthcheck
        assert image.command[0] == "warmgate"

    @pytest.mark.parametrize("name", OURS)
    def test_everything_copied_exists_and_is_let_through(self, name: str) -> None:
        allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        for path in image_of(SERVICES[name]).copied:
            assert (ROOT / path).exists(), path
            assert path in allowed, f".dockerignore keeps {path} out"

    def test_every_package_of_ours_is_copied(self) -> None:
        packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
        for name in OURS:
            assert packages <= set(image_of(SERVICES[name]).copied)

    def test_the_gateway_is_compiled_where_it_looks_for_a_build(self) -> None:
        """By the interpreter and of the sources that the image has, into the cache of the user that it runs as."""
        text = (ROOT / "deploy/Dockerfile.gateway").read_text()
        _, build, last = text.split("\nFROM ")
        made = re.search(r"^RUN .*XDG_CACHE_HOME=(\S+) (\S+)/bin/python -m gateway\.compiled$", build, re.MULTILINE)
        assert made is not None
        cache, environment = made.groups()
        assert made.start() > build.index(f"RUN {environment}/bin/pip install")  # where types are found
        assert f"COPY --from=build {environment} {environment}\n" in last
        user = image_of(SERVICES["gateway"]).user
        assert f"COPY --from=build --chown={user}:{user} {cache} /home/{user}/.cache\n" in last
        assert f"useradd --create-home --uid 10001 {user}\n" in last
        assert "XDG_CACHE_HOME" not in last
        assert build.split()[0] == last.split()[0], "the same interpreter"

    def test_redis_keeps_the_keys_over_a_new_container(self) -> None:
        redis = SERVICES["redis"]
        flags = dict(zip(redis["command"][1::2], redis["command"][2::2], strict=True))
        assert flags["--appendonly"] == "yes"
        name, _, folder = redis["volumes"][0].partition(":")
        assert name in COMPOSE["volumes"]
        assert folder == flags["--dir"]

    def test_mounted_files_exist(self) -> None:
        for service in SERVICES.values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]

    def test_prometheus_scrapes_every_server_of_ours_where_it_listens(self) -> None:
        settings = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        targets = [
            target
            for job in settings["scrape_configs"]
            for static in job["static_configs"]
            for target in static["targets"]
        ]
        assert {target.split(":")[0] for target in targets} == set(OURS)
        for target in targets:
            host, port = target.split(":")
            assert int(port) in image_of(SERVICES[host]).ports

    def test_grafana_finds_its_data_source_and_dashboards(self) -> None:
        folder = ROOT / "deploy/grafana/provisioning"
        [source] = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
        assert source["url"] == "http://prometheus:9090"
        [provider] = yaml.safe_load((folder / "dashboards/warmgate.yaml").read_text())["providers"]
        mounts = dict(reversed(v.split(":")[:2]) for v in SERVICES["grafana"]["volumes"])
        inside = provider["options"]["path"]
        assert (ROOT / mounts[inside] / "warmgate.json").exists()
        assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(inside)
        used = {panel["datasource"]["uid"] for panel in json.loads(DASHBOARD.read_text())["panels"]}
        assert used == {source["uid"]}


@dataclass(frozen=True)
class Fleet:
    """The compose file's servers, running here. `urls` and `ports` by service name."""

    processes: Mapping[str, Process]
    ports: Mapping[str, int]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Every service that we build, with the command and environment that its container would get."""
    first = free_ports(3 * len(OURS))  # KV events take two ports
    ports = {name: first + index for index, name in enumerate(OURS)}
    running: dict[str, Process] = {}
    try:
        for index, name in enumerate(OURS):
            running[name] = _start(name, ports, events_port=first + len(OURS) + 2 * index, home=tmp_path_factory)
        for name in OURS:
            running[name].until_http(f"http://127.0.0.1:{ports[name]}/health", timeout_s=LOAD_LIMIT_S)
        yield Fleet(running, ports)
    finally:
        for process in running.values():
            process.close()


def _start(name: str, ports: Mapping[str, int], events_port: int, home: pytest.TempPathFactory) -> Process:
    service, image = SERVICES[name], image_of(SERVICES[name])
    listens = image.ports[0]
    addresses = {(other, image_of(SERVICES[other]).ports[0]): port for other, port in ports.items()}
    env = {key: moved(str(value), addresses) for key, value in service.get("environment", {}).items()}
    if "WARMGATE_PORT" in env:
        assert int(env["WARMGATE_PORT"]) == listens
        env["WARMGATE_PORT"] = str(ports[name])
    assert env.get("WARMGATE_HOST", "0.0.0.0") == "0.0.0.0", "a container must listen on its network"
    numbers = {str(listens): str(ports[name]), "8201": str(events_port)}
    command, *arguments = (numbers.get(word, word) for word in image.command)
    if name.startswith("worker"):
        assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
    here = str(Path(sys.executable).with_name(command))
    return Process([here, *arguments], env)


@pytest.mark.e2e
class TestContainers:
    @pytest.mark.parametrize("name", OURS)
    def test_the_health_check_succeeds_while_it_runs_and_fails_when_it_does_not(self, fleet: Fleet, name: str) -> None:
        image = image_of(SERVICES[name])
        program, *arguments = image.healthcheck
        assert program == "python"
        for port, healthy in ((fleet.ports[name], True), (1, False)):
            moved_there = [word.replace(f":{image.ports[0]}/", f":{port}/") for word in arguments]
            done = subprocess.run([sys.executable, *moved_there], capture_output=True, timeout=30)
            assert (done.returncode == 0) is healthy

    def test_requests_reach_both_workers(self, fleet: Fleet) -> None:
        model = httpx.get(f"{fleet.url('gateway')}/v1/models", trust_env=False).json()["data"][0]["id"]
        fleet.processes["gateway"].until("both workers are in service", lambda: self._up(fleet) == 2)

        def ask(number: int) -> str:
            answer = httpx.post(
                f"{fleet.url('gateway')}/v1/chat/completions",
                json={"model": model, "messages": [{"role": "user", "content": f"{number} " * 40}], "max_tokens": 4},
                timeout=120,
                trust_env=False,
            )
            assert answer.status_code == 200, answer.text
            return answer.headers["x-warmgate-replica"]

        with ThreadPoolExecutor(8) as pool:  # one at a time, all may go where the prompts' common head is cached
            assert len(set(pool.map(ask, range(16)))) == 2

    def test_every_metric_of_the_dashboard_is_exported(self, fleet: Fleet) -> None:
        """Names of the dashboard's expressions against what gateway and worker export, by type."""
        exported = set()
        for name in ("gateway", "worker-1"):
            text = httpx.get(f"{fleet.url(name)}/metrics", trust_env=False).text
            for family in text_string_to_metric_families(text):
                suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
                exported |= {family.name + suffix for suffix in suffixes}
        wanted = dashboard_metrics()
        assert len(wanted) > 12
        assert wanted - exported == set()

    def test_every_label_of_the_dashboard_is_exported(self, fleet: Fleet) -> None:
        labels = {"instance", "job", "le"}  # Prometheus' own, and the histograms'
        for name in ("gateway", "worker-1"):
            text = httpx.get(f"{fleet.url(name)}/metrics", trust_env=False).text
            labels |= {key for f in text_string_to_metric_families(text) for s in f.samples for key in s.labels}
        expressions = " ".join(target["expr"] + target["legendFormat"] for target in dashboard_targets())
        used = set(re.findall(r"\{\{(\w+)\}\}", expressions))
        used |= {word for group in re.findall(r"by \(([^)]*)\)", expressions) for word in re.split(r",\s*", group)}
        # Of failovers and tenants: a labelled counter shows its labels only once it has counted.
        silent = {"kind", "tenant", "limit"}
        assert used - labels - silent == set()

    def _up(self, fleet: Fleet) -> int:
        text = httpx.get(f"{fleet.url('gateway')}/metrics", trust_env=False).text
        return len(re.findall(r"^warmgate_replica_up\{.*\} 1\.0$", text, re.M))


def dashboard_targets() -> list[dict[str, str]]:
    return [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def dashboard_metrics() -> set[str]:
    return {name for t in dashboard_targets() for name in re.findall(r"\b(?:warmgate_|vllm:)\w+", t["expr"])}
