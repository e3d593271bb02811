"""The command `warmgate`. Heavy modules are imported by the command that needs them, so that `--help` answers at once.

The worker and the load tools are other processes: they are started, never imported, so no import crosses the house's
import table (torch never reaches the gateway).
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.tenancy.command import app as keys_app
from gateway.tenancy.keys import KeysError, NoKeysFile

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="warmgate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A cache-aware LLM gateway: each request goes to the replica that holds its prefix warm.",
)


app.add_typer(keys_app, name="keys")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    show: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="The version.")
    ] = False,
) -> None:
    """Options of the command itself; its help is the application's."""


class UserError(Exception):
    """The user's mistake: shown as one sentence, without a traceback."""


@app.command(context_settings=PASS_ON)
def serve(
    context: typer.Context,
    replica: Annotated[list[str] | None, typer.Option(help="A replica's base URL; repeat it for each.")] = None,
    policy: Annotated[str | None, typer.Option(help="warm (default), or another rule: a wrong name lists all.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; flags win over it.")] = None,
) -> None:
    """Run the gateway in front of replicas that are there already.

    Every setting of the file is a flag too: stream_idle_s is --stream-idle-s, or WARMGATE_STREAM_IDLE_S;
    docs/settings.md lists them all. The longest that a request may take is --request-s, which may be written
    --request-timeout as other servers name it.
    """
    from gateway import compiled

    compiled.activate()  # before anything imports what it stands for
    from gateway.config import ConfigError, GatewaySettings, load_settings

    flags: dict[str, object] = {"replicas": replica, "policy": policy, "host": host, "port": port}
    try:
        settings = load_settings(
            {**flags, **_setting_flags(context.args, frozenset(GatewaySettings.model_fields))}, config
        )
    except ConfigError as error:
        raise UserError(str(error)) from None
    from gateway.server import run

    raise typer.Exit(run(settings))


_ALSO_NAMED = {"request_timeout": "request_s", "request_timeout_s": "request_s"}


def _setting_flags(arguments: list[str], names: frozenset[str]) -> dict[str, object]:
    """`--some-setting value` and `--some-setting=value`, for any name in `names`."""
    flags: dict[str, object] = {}
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        name = _ALSO_NAMED.get(name, name)
        if not flag.startswith("--") or name not in names:
            guess = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean --{guess[0].replace('_', '-')}?" if guess else "; see warmgate serve --help"
            raise UserError(f"there is no option {flag}{hint}")
        if name in ("secret", "redis_url", "salt_secret"):
            variable = f"WARMGATE_{name.upper()}"
            raise UserError(f"a secret on the command line shows in every process list: set {variable} instead")
        if not equals:
            if not rest:
                raise UserError(f"{flag} needs a value")
            value = rest.pop(0)
        flags[name] = value
    return flags


@app.command(context_settings={**PASS_ON, "help_option_names": []}, add_help_option=False)
def worker(context: typer.Context) -> None:
    """Run one worker: a model behind OpenAI's API. Its own options: warmgate worker --help."""
    _become("engine_worker", context.args, "engine", "A worker")


@app.command(context_settings=PASS_ON)
def up(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, a hub id, or demo.")] = "demo",
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    host: Annotated[str | None, typer.Option(help="Address of the gateway (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the gateway (8000).")] = None,
    worker_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first worker.")] = 8101,
    policy: Annotated[str | None, typer.Option(help="How requests are routed (warm).")] = None,
    gateway_config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings for the gateway; flags win over it.")
    ] = None,
    keys_file: Annotated[Path | None, typer.Option(help="Who may use the gateway: warmgate keys makes it.")] = None,
    allow_open: Annotated[str | None, typer.Option(help="true: listen beyond this machine without keys.")] = None,
    shadow_policies: Annotated[str | None, typer.Option(help="Decide beside it, for warmgate advise: a,b.")] = None,
    record_trace: Annotated[Path | None, typer.Option(help="A file of the traffic, for warmgate replay.")] = None,
) -> None:
    """Bring up a gateway and its workers on this machine, and keep them up. Further options go to the workers."""
    from gateway.supervise import preflight
    from gateway.supervise.plan import UpOptions
    from gateway.supervise.run import up as bring_up

    try:
        settings = preflight.settings_of({"host": host, "port": port, "policy": policy}, gateway_config)
    except preflight.CannotStart as problem:
        typer.echo(problem, err=True)
        raise typer.Exit(1) from None
    given = {
        "keys_file": keys_file, "allow_open": allow_open, "shadow_policies": shadow_policies,
        "record_trace": record_trace,
    }  # fmt: skip
    options = UpOptions(
        model=model,
        num_workers=workers,
        host=settings.host,
        port=settings.port,
        worker_port=worker_port,
        policy=settings.policy,
        worker_args=tuple(context.args),
        gateway_config=gateway_config,
        gateway_settings={name: str(value) for name, value in given.items() if value is not None},
    )
    raise typer.Exit(bring_up(options))


@app.command(context_settings={**PASS_ON, "help_option_names": []}, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Compare round_robin with warm on the demo model, side by side."""
    _become("loadtest.demo", context.args, "loadtest", "The demo")


@app.command(context_settings={**PASS_ON, "help_option_names": []}, add_help_option=False)
def replay(context: typer.Context) -> None:
    """Simulate policies over a trace of your requests, in simulated time; --help tells the format."""
    _become("loadtest.sim", context.args, "loadtest", "The simulator")


@app.command()
def advise(
    url: Annotated[str, typer.Option(help="The gateway to ask.")] = "http://127.0.0.1:8000",
) -> None:
    """Say whether another policy would pay for the traffic of a running gateway (its setting: shadow_policies).

    A gateway with API keys tells it on its own machine, and elsewhere to whoever has WARMGATE_SECRET set as it has.
    """
    import httpx

    secret = os.environ.get("WARMGATE_SECRET", "").strip()
    headers = {b"x-warmgate-secret": secret.encode()} if secret else {}
    try:
        answer = httpx.get(f"{_gateway_url(url)}/advice", headers=headers, timeout=10.0, trust_env=False)
        if answer.status_code == 401:
            which = "has another secret than WARMGATE_SECRET here" if secret else "wants the secret"
            raise UserError(f"{url} {which}: set WARMGATE_SECRET as the gateway has it")
        sentences = [str(sentence) for sentence in answer.raise_for_status().json()["sentences"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        why = f"it answered {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else error
        raise UserError(f"{url} gives no advice ({why}): is a gateway running there? Name it with --url") from None
    for sentence in sentences:
        typer.echo(sentence)


def _gateway_url(url: str) -> str:
    """From what people have at hand: without a scheme, or with the /v1 that clients want."""
    url = url.strip() if "://" in url else f"http://{url.strip()}"
    return url.rstrip("/").removesuffix("/v1")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"warmgate {installed('warmgate')}")


def _become(module: str, arguments: list[str], extra: str, who: str) -> None:
    """Replaces this process, so that signals, the terminal and the exit status are the started command's own."""
    from gateway.supervise.preflight import CannotStart, check_extra

    try:
        check_extra(extra, who)
    except CannotStart as error:
        raise UserError(str(error)) from None
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main() -> None:
    try:
        app()
    except (UserError, KeysError) as error:
        print(f"warmgate: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, NoKeysFile) else 2)


if __name__ == "__main__":
    main()
