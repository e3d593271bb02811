"""What the containers run, read out of docker-compose.yml and the Dockerfiles, so that tests can run just that."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import ROOT


@dataclass(frozen=True)
class Image:
    """The last stage of a Dockerfile, as far as starting it goes."""

    command: tuple[str, ...]
    healthcheck: tuple[str, ...]
    env: Mapping[str, str]
    user: str
    ports: tuple[int, ...]
    copied: tuple[str, ...]  # everything that is copied from the build context, by any stage


def read_dockerfile(path: Path) -> Image:
    lines = re.sub(r"\\\n\s*", " ", path.read_text()).splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    last = max(index for index, (name, *_) in enumerate(words) if name == "FROM")
    stage: dict[str, list[str]] = {}
    for name, rest in words[last:]:
        stage.setdefault(name, []).append(rest)
    copied = [rest.split()[:-1] for name, rest in words if name == "COPY" and not rest.startswith("--from")]
    return Image(
        command=tuple(json.loads(stage["CMD"][-1])),
        healthcheck=tuple(json.loads(stage["HEALTHCHECK"][-1].partition("CMD ")[2])),
        env=dict(pair.split("=", 1) for rest in stage.get("ENV", []) for pair in rest.split()),
        user=stage["USER"][-1],
        ports=tuple(int(port) for rest in stage.get("EXPOSE", []) for port in rest.split()),
        copied=tuple(path for paths in copied for path in paths),
    )


def compose_text() -> str:
    """The compose file with `${NAME:-default}` at its defaults, as compose reads it in an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "docker-compose.yml").read_text())


def read_compose() -> dict[str, Any]:
    return yaml.safe_load(compose_text())


def image_of(service: Mapping[str, Any]) -> Image:
    return read_dockerfile(ROOT / service["build"]["context"] / service["build"]["dockerfile"])


def moved(text: str, ports: Mapping[tuple[str, int], int]) -> str:
    """A setting or argument with `host:port` of the compose network moved to loopback and other ports."""
    for (host, port), other in ports.items():
        text = text.replace(f"{host}:{port}", f"127.0.0.1:{other}")
    return text
