"""`warmgate keys`: make, list and revoke API keys, and set the limits that all keys of a tenant share.

Keys are kept in a file (`--keys-file`, WARMGATE_KEYS_FILE) or, with WARMGATE_KEYS_REDIS=true, in the Redis that the
gateways share (WARMGATE_REDIS_URL, WARMGATE_FLEET). Gateways notice changes by themselves.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated, cast

import typer

from gateway.tenancy.keys import PERIODS, KeysError, Limits, NoKeysFile, Priority, check_name, new_key, read_period
from gateway.tenancy.store import FileStore, KeyStore, RedisStore

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make, list and revoke API keys.")

KeysFile = Annotated[
    Path | None, typer.Option("--keys-file", envvar="WARMGATE_KEYS_FILE", help="The file that holds the keys' digests.")
]
KeysRedis = Annotated[
    bool, typer.Option("--keys-redis", envvar="WARMGATE_KEYS_REDIS", help="Keys are in Redis (WARMGATE_REDIS_URL).")
]
Fleet = Annotated[str, typer.Option(envvar="WARMGATE_FLEET", help="The gateways' fleet, for keys in Redis.")]
Rpm = Annotated[int, typer.Option("--rpm", min=0, help="Requests a minute; 0 for no limit.")]
Tpm = Annotated[int, typer.Option("--tpm", min=0, help="Tokens a minute, prompt and output; 0 for no limit.")]
Concurrency = Annotated[int, typer.Option(min=0, help="Requests at once; 0 for no limit.")]
Budget = Annotated[int, typer.Option("--budget", min=0, help="Tokens in a period; 0 for no limit.")]
Period = Annotated[str, typer.Option("--budget-period", help="Its length: 30d, 12h, 1w, or none.")]


def _store(file: Path | None, redis: bool, fleet: str, *, makes: bool = False) -> KeyStore:
    """Raises NoKeysFile where there is none and the command doesn't make it (`makes`)."""
    if redis:
        url = os.environ.get("WARMGATE_REDIS_URL", "").strip()
        if not url:
            raise KeysError("--keys-redis needs WARMGATE_REDIS_URL, such as redis://127.0.0.1:6379/0")
        return RedisStore(url, fleet)
    if file is None:
        raise KeysError("say where the keys are: --keys-file keys.json, or --keys-redis")
    if not makes and not file.exists():
        raise NoKeysFile(
            f"there is no keys file {file}: warmgate keys create --tenant NAME --keys-file {file} makes it"
        )
    return FileStore(file)


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose key it is; keys of one tenant share prefixes and its limits.")],
    model: Annotated[list[str] | None, typer.Option(help="A model it may use; repeat it. All when none.")] = None,
    rpm: Rpm = 0,
    tpm: Tpm = 0,
    concurrency: Concurrency = 0,
    budget: Budget = 0,
    budget_period: Period = "1d",
    priority: Annotated[str, typer.Option(help="high, normal or low: its share when the fleet is full.")] = "normal",
    keys_file: KeysFile = None,
    keys_redis: KeysRedis = False,
    fleet: Fleet = "default",
) -> None:
    """Make a key and show it, this once."""
    if priority not in ("high", "normal", "low"):
        raise KeysError(f"{priority!r} is no priority: choose high, normal or low")
    limits = Limits(rpm, tpm, concurrency, budget, read_period(budget_period))
    key, record = new_key(tenant, tuple(model or ()), cast(Priority, priority), limits)
    _store(keys_file, keys_redis, fleet, makes=True).put(record)
    typer.echo(f"{record.id} of {tenant}; it is not shown again:", err=True)
    typer.echo(key)


@app.command("list")
def show(keys_file: KeysFile = None, keys_redis: KeysRedis = False, fleet: Fleet = "default") -> None:
    """Every key's id, tenant, age and limits (the keys themselves are kept nowhere)."""
    book = _store(keys_file, keys_redis, fleet).read()
    for record in sorted(book.keys.values(), key=lambda each: (each.tenant, each.created, each.id)):
        day = datetime.datetime.fromtimestamp(record.created, datetime.UTC).date().isoformat()
        models = "models " + ",".join(record.models) if record.models else "all models"
        typer.echo(f"{record.id}  {record.tenant}  {day}  {record.priority}  {models}  {_limits(record.limits)}")
    for tenant, limits in sorted(book.tenants.items()):
        typer.echo(f"tenant {tenant}: {_limits(limits)}")
    if not book.keys:
        typer.echo("No keys: warmgate keys create --tenant NAME makes one.", err=True)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `warmgate keys list` shows it.")],
    keys_file: KeysFile = None,
    keys_redis: KeysRedis = False,
    fleet: Fleet = "default",
) -> None:
    """Take a key out of use; gateways refuse it within two seconds."""
    if not _store(keys_file, keys_redis, fleet).remove(key_id):
        raise KeysError(f"there is no key {key_id!r}: warmgate keys list shows those there are")
    typer.echo(f"{key_id} is revoked.", err=True)


@app.command()
def limit(
    tenant: Annotated[str, typer.Argument(help="Whose limits; they hold for all of its keys together.")],
    rpm: Rpm = 0,
    tpm: Tpm = 0,
    concurrency: Concurrency = 0,
    budget: Budget = 0,
    budget_period: Period = "1d",
    keys_file: KeysFile = None,
    keys_redis: KeysRedis = False,
    fleet: Fleet = "default",
) -> None:
    """Set a tenant's own limits in place of those it had; none given takes them away."""
    check_name(tenant)
    limits = Limits(rpm, tpm, concurrency, budget, read_period(budget_period))
    store = _store(keys_file, keys_redis, fleet)
    store.limit(tenant, limits)
    typer.echo(f"{tenant}: {_limits(limits)}.", err=True)
    if limits.any and all(record.tenant != tenant for record in store.read().keys.values()):
        typer.echo(f"No key is {tenant}'s yet: warmgate keys create --tenant {tenant} makes one.", err=True)


def _limits(limits: Limits) -> str:
    named = [
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.concurrency, "at once"),
        (limits.budget_tokens, f"tokens/{_period(limits.budget_period_s)}"),
    ]
    return ", ".join(f"{count} {unit}" for count, unit in named if count) or "no limits"


def _period(seconds: int) -> str:
    units = [(size, unit) for unit, size in PERIODS.items() if seconds % size == 0]
    return f"{seconds // max(units)[0]}{max(units)[1]}" if seconds and units else "ever"
