"""Two gateway processes, fake workers and Redis, all real processes: one dies, then Redis does."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator

import httpx

from tests.support.processes import Process, free_ports, python
from tests.support.redis_server import RedisServer

NUM_HELD = 6


def figure(port: int, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))


@contextlib.contextmanager
def gateway(port: int, workers: range, redis: RedisServer) -> Iterator[Process]:
    env = {
        "WARMGATE_REDIS_URL": redis.url,
        "WARMGATE_REPLICAS": ",".join(f"http://127.0.0.1:{worker}" for worker in workers),
        "WARMGATE_PORT": str(port),
        "WARMGATE_ACCESS_LOG": "",
    }
    with python("-m", "gateway.server", env=env) as process:
        process.until_http(f"http://127.0.0.1:{port}/ready")
        yield process


def stream(port: int, number: int) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": f"{number} " * 400}], "stream": True}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120, trust_env=False)


def test_a_killed_gateways_leases_end_and_the_other_serves_without_redis() -> None:
    first = free_ports(4)
    workers, one, two = range(first, first + 2), first + 2, first + 3
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        for port in workers:
            worker = python("-m", "loadtest.fake_worker", "--port", str(port), "--state", "--first-token-s", "60")
            stack.enter_context(worker).until_http(f"http://127.0.0.1:{port}/health")
        killed = stack.enter_context(gateway(one, workers, redis))
        survivor = stack.enter_context(gateway(two, workers, redis))
        survivor.until("they know each other", lambda: figure(two, "warmgate_sharing_peers") == 1)

        clients = [threading.Thread(target=stream, args=(one, number)) for number in range(NUM_HELD)]
        for client in clients:
            client.start()
        survivor.until("its requests are known", lambda: figure(two, "warmgate_sharing_remote_leases") == NUM_HELD)
        killed.send(signal.SIGKILL)
        killed.until_exit()
        survivor.until("they are over", lambda: figure(two, "warmgate_sharing_remote_leases") == 0)
        assert figure(two, "warmgate_sharing_peers") == 0
        for client in clients:
            client.join()

        redis.kill()
        for port in workers:
            script = json.dumps({"num_tokens": 3})
            httpx.post(f"http://127.0.0.1:{port}/fake/script", content=script, timeout=10, trust_env=False)
        survivor.until("it notices", lambda: figure(two, "warmgate_sharing_up") == 0)
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"http://127.0.0.1:{two}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200
        health = httpx.get(f"http://127.0.0.1:{two}/health", timeout=10, trust_env=False).json()
        assert health["sharing"]["state"] == "local"
        survivor.send(signal.SIGTERM)
        assert survivor.until_exit() == 0
