"""Where a replica's KV events are read, and the sockets that read them."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

_MAX_MESSAGE_BYTES = 16 * 2**20
_QUEUED_MESSAGES = 100_000


@contextlib.contextmanager
def connected(context: zmq.asyncio.Context, kind: int, endpoint: str) -> Iterator[zmq.asyncio.Socket]:
    """A socket that reconnects by itself and is closed, with what it still holds, at the end of the block."""
    socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # notices a peer whose machine is gone
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(linger=0)


def reachable_endpoint(endpoint: str, replica_url: str) -> str | None:
    """A replica's ZMQ endpoint as the gateway should connect to it; None where it can't be reached from here.

    For tcp the host is always that of the replica's URL, which is the one that was configured: a replica may name a
    port, but not send the gateway to other machines. What is bound to loopback can be read only from loopback.
    """
    host = urlsplit(replica_url).hostname or ""
    if not endpoint.startswith("tcp://"):
        return endpoint if endpoint.startswith("ipc://") and _is_loopback(host) else None
    named, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdigit() or not host:
        return None
    if _is_loopback(named.strip("[]")) and not _is_loopback(host):
        return None
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
