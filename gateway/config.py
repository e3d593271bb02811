"""The gateway's settings: one model, filled from flags, then `WARMGATE_*`, then a YAML file, then defaults.

Every name is the same in all three places: flag `--stream-idle-s`, variable `WARMGATE_STREAM_IDLE_S`, YAML key
`stream_idle_s`. A replica is a URL or, in YAML, a mapping with `url` and options. Whatever is wrong with a setting is
said in one sentence (`ConfigError`) that names the setting and how to mend it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.config_words import sentence, unknown_key

DialectName = Literal["auto", "warmgate", "vllm", "sglang", "llamacpp", "generic"]


class ConfigError(Exception):
    """A setting is wrong. The message is one sentence for whoever starts the gateway."""


class ReplicaSpec(BaseModel):
    """One engine endpoint, as configured.

    url      base URL without `/v1`
    model    the model id that it serves, when it can't be asked for (else learned from the replica)
    name     its id in headers, metrics and logs (default: host:port)
    dialect  how its state is read; `auto` finds out
    tokenizer a folder with tokenizer.json, for engines that don't serve their tokenizer
    api_key  sent to the replica as a bearer token (the client's own key never is)
    cache_salt
             whether it keeps prompts with different `cache_salt` apart in its cache (default: bundled workers and vLLM
             do). False: the field isn't sent there
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    model: str | None = None
    name: str = ""
    dialect: DialectName = "auto"
    tokenizer: Path | None = None
    api_key: SecretStr | None = None
    cache_salt: bool | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a replica URL; write it like http://127.0.0.1:8101")
        if parts.username or parts.query or parts.fragment:
            raise ValueError(f"the replica URL {parts.hostname!r} may hold no credentials, query or fragment")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(f"{url!r} has no valid port; ports go from 1 to 65535") from None
        return url

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"url": value}
        if isinstance(value, Mapping) and not value.get("name") and isinstance(value.get("url"), str):
            raw = value["url"].strip().rstrip("/").removesuffix("/v1")
            parts = urlsplit(raw)
            value = {**value, "name": parts.netloc + parts.path.rstrip("/")}
        return value

    @field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; name one with a tokenizer.json, or leave tokenizer out")
        return folder

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[\x21-\x7e]{1,128}", name):
            raise ValueError("a replica's name may hold 1 to 128 printable ASCII characters and no spaces")
        return name


class GatewaySettings(BaseSettings):
    """Everything `warmgate serve` can be told. Times in seconds, sizes in bytes.

    connect_s       to a TCP connection with a replica
    first_token_s   from dispatch to the first token of a streamed answer, then failover
    stuck_after_s   a replica that has answered no poll this long loses the requests still waiting on it to failover
    resume          answers that break after their first token are continued elsewhere: off, exact or all (resume.py)
    stream_idle_s   between two chunks of a stream from a replica, and for a client that doesn't read what it asked for
    stream_join_s   that a fast stream isn't read for after each piece while many keep the gateway busy (joining.py);
                    0: never
    request_s       a whole request, from its last byte read to its last byte sent (--request-timeout means it, too);
                    a client that says in x-stainless-read-timeout how long it waits gets no longer than that
    body_s          for a client to send its request's body
    drain_s         for requests in flight after SIGTERM
    unready_s       after SIGTERM /ready says no while requests are still taken, for balancers to look elsewhere
    slow_start_s    over which a replica that comes back under load gets its full share again; 0: at once
    max_in_flight   requests under way at once (0: as many as file descriptors allow); the surplus waits
    max_queued      requests that may wait for their turn, each for `queue_s`
    processes       gateway processes behind the one port (processes.py); more than one need `redis_url`
    redis_url       where gateways of one fleet share what they know: `redis://host:6379/0`, `rediss://...` with TLS
    fleet           the name that these gateways have in common there; their replicas must have the same names
    shadow_policies other policies that decide beside the live one, without acting (observe/shadow.py); `a,b,...`
    shadow_share    of the decisions, that they take part in
    warmup_store_bytes
                    prompts kept in memory, to be replayed where they will be needed (replicas/hot_prompts.py); 0, the
                    default, keeps none
    warmup_s        for a replica that comes (back) to be given the hottest of them
    handover_s      for those of a replica that drains to be given to others
    keys_file       who may use this gateway: the file that `warmgate keys` writes (tenancy/); read anew when it changes
    keys_redis      the same from Redis, for all gateways of the fleet
    keys_stale_s    how long the keys known stay in use while they can't be read
    allow_open      listen on other addresses than loopback without keys
    salt_secret     what tenants' cache salts are made with, the same on all gateways (default: kept with the keys)
    share_prefixes  tenants that may share cached prefixes: `GROUP=tenant,tenant GROUP=...`
    unsalted_replicas
                    whether requests with keys may go to replicas that can't keep tenants' caches apart: refuse or allow
    replica_slots   requests that a replica gets at once, the surplus waiting here, fairly between tenants; 0: with keys
                    it is learned from replicas that report a queue of their own, without keys there is no bound
    model_aliases   other names for models (aliases.py): a mapping, or `alias=model,...`
    allowed_origins web pages that may call this gateway from a browser: `https://example.com,...`, or `*`
    responses_store_bytes
                    answers of the Responses API kept for later turns, in memory; 0 keeps none
    record_trace    a file for `warmgate replay` that gets a line a request, without prompts (observe/trace_file.py)
    """

    model_config = SettingsConfigDict(env_prefix="WARMGATE_", extra="ignore", frozen=True)

    replicas: Annotated[list[ReplicaSpec], NoDecode] = Field(default_factory=list)
    policy: str = "warm"
    keys_file: Path | None = None
    keys_redis: bool = False
    keys_stale_s: float = Field(default=3600.0, gt=0)
    allow_open: bool = False
    salt_secret: SecretStr | None = Field(default=None, min_length=16)
    share_prefixes: Annotated[dict[str, list[str]], NoDecode] = Field(default_factory=dict)
    unsalted_replicas: Literal["refuse", "allow"] = "refuse"
    replica_slots: int = Field(default=0, ge=0)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    secret: SecretStr | None = None
    seed: int | None = None

    connect_s: float = Field(default=3.0, gt=0)
    first_token_s: float = Field(default=120.0, gt=0)
    stuck_after_s: float = Field(default=15.0, gt=0)
    stream_idle_s: float = Field(default=120.0, gt=0)
    stream_join_s: float = Field(default=0.01, ge=0, le=1)
    request_s: float = Field(default=1800.0, gt=0)
    body_s: float = Field(default=60.0, gt=0)
    resume: Literal["off", "exact", "all"] = "exact"
    drain_s: float = Field(default=30.0, ge=0)
    unready_s: float = Field(default=0.0, ge=0)
    slow_start_s: float = Field(default=10.0, ge=0)

    processes: int = Field(default=1, ge=1, le=128)
    max_in_flight: int = Field(default=0, ge=0)
    max_queued: int = Field(default=1000, ge=0)
    queue_s: float = Field(default=30.0, gt=0)

    poll_interval_s: float = Field(default=1.0, gt=0)
    poll_timeout_s: float = Field(default=2.0, gt=0)
    poll_failures: int = Field(default=3, ge=1)

    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    max_response_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    max_sse_line_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    max_connections_per_replica: int = Field(default=16384, ge=1)

    shadow_policies: Annotated[list[str], NoDecode] = Field(default_factory=list)
    shadow_share: float = Field(default=0.1, ge=0.0, le=1.0)

    warmup_store_bytes: int = Field(default=0, ge=0)
    warmup_s: float = Field(default=20.0, ge=0)
    handover_s: float = Field(default=30.0, ge=0)

    redis_url: SecretStr | None = None
    fleet: str = Field(default="default", pattern=r"^[A-Za-z0-9_.-]{1,64}$")

    model_aliases: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    allowed_origins: Annotated[list[str], NoDecode] = Field(default_factory=list)
    responses_store_bytes: int = Field(default=64 * 1024 * 1024, ge=0)

    access_log: str = "-"  # "-" for standard output, "" for none, else a file
    record_trace: Path | None = None
    record_trace_bytes: int = Field(default=256 * 1024 * 1024, ge=4096)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        assert isinstance(env_settings, EnvSettingsSource)
        values = dict(init_settings.init_kwargs)
        file_values = values.pop("_file_values", {})
        flags = InitSettingsSource(settings_cls, init_kwargs=values)
        return flags, env_settings, InitSettingsSource(settings_cls, init_kwargs=file_values)

    @field_validator("replicas", mode="before")
    @classmethod
    def _split_replicas(cls, value: Any) -> Any:
        if isinstance(value, str):
            text = value.strip()
            if text.startswith("["):
                parsed = yaml.safe_load(text)
                return parsed if isinstance(parsed, list) else [text]
            return [part for part in re.split(r"[\s,]+", text) if part]
        return value

    @field_validator("model_aliases", mode="before")
    @classmethod
    def _split_aliases(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [part.strip() for part in value.split(",") if part.strip()]
        if any("=" not in pair for pair in pairs):
            raise ValueError("write aliases like `gpt-4o=my-model,claude-*=my-model`")
        return dict(pair.split("=", 1) for pair in pairs)

    @field_validator("keys_file", "salt_secret", "record_trace", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("share_prefixes", mode="before")
    @classmethod
    def _split_groups(cls, value: Any) -> Any:
        if isinstance(value, str):
            pairs = [part.partition("=") for part in re.split(r"[\s;]+", value) if part]
            value = {group: [name for name in tenants.split(",") if name] for group, _, tenants in pairs}
        if isinstance(value, Mapping):
            named = [tenant for tenants in value.values() if isinstance(tenants, list) for tenant in tenants]
            if any(not tenants for tenants in value.values()) or len(set(map(str, named))) < len(named):
                raise ValueError("write groups like `GROUP=tenant,tenant OTHER=tenant`, each tenant in one of them")
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> GatewaySettings:
        if self.keys_redis and self.redis_url is None:
            raise ValueError("keys_redis needs WARMGATE_REDIS_URL, such as redis://127.0.0.1:6379/0")
        if self.keys_redis and self.keys_file is not None:
            raise ValueError("keys are in a file or in Redis: give keys_file or keys_redis, not both")
        return self

    @field_validator("allowed_origins", "shadow_policies", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return [part for part in re.split(r"[\s,]+", value) if part] if isinstance(value, str) else value

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
                raise ValueError(f"{origin!r} is no origin; write it like https://example.com, without a path, or `*`")
        return origins

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: SecretStr | None) -> SecretStr | None:
        """An empty one is none: compose files pass variables on that may be unset."""
        if url is None or not url.get_secret_value().strip():
            return None
        if not re.match(r"^(rediss?|unix)://", url.get_secret_value()):
            raise ValueError("write it like redis://127.0.0.1:6379/0, rediss://... for TLS or unix:///path")
        try:
            from redis.asyncio.connection import parse_url  # seldom needed, and slow to import

            parse_url(url.get_secret_value())
        except ValueError as error:
            raise ValueError(f"{error}") from None
        return url

    @field_validator("replicas")
    @classmethod
    def _unique_names(cls, replicas: list[ReplicaSpec]) -> list[ReplicaSpec]:
        seen: set[str] = set()
        for replica in replicas:
            if replica.name in seen:
                raise ValueError(f"two replicas are named {replica.name!r}; give each its own url or name")
            seen.add(replica.name)
        return replicas


def load_settings(flags: Mapping[str, Any] | None = None, config_file: str | Path | None = None) -> GatewaySettings:
    """Settings from `flags` (None values don't count), the environment, and a YAML file, in that order of precedence.

    `config_file` falls back to `WARMGATE_CONFIG`. Raises ConfigError.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None and value != []}
    path = config_file or os.environ.get("WARMGATE_CONFIG")
    file_values = _read_yaml(Path(path)) if path else {}
    try:
        return GatewaySettings(_file_values=file_values, **given)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError(sentence(error, ReplicaSpec.model_fields)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the settings file {path} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"the settings file {path} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise ConfigError(f"the settings file {path} is not valid YAML{line}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the settings file {path} must hold a mapping like `policy: warm`.")
    known = set(GatewaySettings.model_fields)
    for key in values:
        if key not in known:
            raise ConfigError(unknown_key(path, key, known))
    return values
