"""Who could use a gateway with these settings: seen before it listens, and before `warmgate up` starts anything."""

from __future__ import annotations

import ipaddress

from gateway.config import GatewaySettings


def problem(settings: GatewaySettings) -> str | None:
    """Why a gateway must not start so, in one sentence, or None."""
    if settings.keys_file is not None and not settings.keys_file.exists():
        path = settings.keys_file
        return f"there is no keys file {path}: `warmgate keys create --tenant NAME --keys-file {path}` makes it."
    if settings.allow_open or has_keys(settings) or is_loopback(settings.host):
        return None
    return (
        f"listening on {settings.host} without API keys would let anybody use the models: make keys with "
        "`warmgate keys create` and name their --keys-file, or say --allow-open true."
    )


def has_keys(settings: GatewaySettings) -> bool:
    """Whether requests need API keys."""
    return settings.keys_file is not None or settings.keys_redis


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
