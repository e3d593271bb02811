"""Where a gateway listens without keys, what its settings refuse, and small parts of what clients are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.answer import Answer
from gateway.app import create_app
from gateway.config import ConfigError, GatewaySettings, load_settings
from gateway.openai.parse import parse_request
from gateway.replicas.room import FORGET, Room
from gateway.server import EXIT_USAGE, run
from gateway.tenancy.estimate import EXPECTED_OUTPUT_TOKENS, TOKENS_PER_MEDIUM, estimate
from gateway.tenancy.limits import Denied, Limit
from gateway.tenancy.refusals import duration, refusal
from tests.gateway.tenancy.support import Keys

REPLICA = "http://127.0.0.1:1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_without_keys_only_loopback_is_listened_on(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GatewaySettings(replicas=[REPLICA], host=host, port=0)) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "without API keys" in said
    assert "--keys-file" in said
    assert said.count("\n") == 1


def test_a_file_of_keys_that_is_none_stops_the_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{")
    assert run(GatewaySettings(replicas=[REPLICA], keys_file=path, port=0, access_log="")) == EXIT_USAGE
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"keys_redis": True}, "WARMGATE_REDIS_URL"),
        ({"keys_redis": True, "redis_url": "redis://x", "keys_file": "k"}, "not both"),
        ({"share_prefixes": "a"}, "GROUP=tenant"),
        ({"share_prefixes": "a=x,y b=y"}, "GROUP=tenant"),
        ({"salt_secret": "short"}, "salt_secret"),
        ({"unsalted_replicas": "maybe"}, "unsalted_replicas"),
    ],
)
def test_settings_that_are_wrong(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_settings(flags)


def test_groups_from_the_environment_and_from_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMGATE_SHARE_PREFIXES", "one=a,b two=c")
    assert load_settings().share_prefixes == {"one": ["a", "b"], "two": ["c"]}
    assert GatewaySettings(share_prefixes={"one": ["a"]}).share_prefixes == {"one": ["a"]}
    monkeypatch.setenv("WARMGATE_KEYS_FILE", "")
    assert load_settings().keys_file is None


async def ask_from(peer: str, app: Any, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.get(path, headers=headers)


async def test_operators_pages_are_for_this_machine_or_need_the_secret(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    key = keys.make("acme")
    values: dict[str, Any] = {"replicas": [REPLICA], "access_log": "", "keys_file": keys.path}
    app = create_app(GatewaySettings(**values, secret="open sesame"))
    for path in ("/metrics", "/advice"):
        assert (await ask_from("127.0.0.1", app, path)).status_code == 200
        assert (await ask_from("192.0.2.1", app, path)).status_code == 401
        assert (await ask_from("192.0.2.1", app, path, {"authorization": f"Bearer {key}"})).status_code == 401
        for good in ({"x-warmgate-secret": "open sesame"}, {"authorization": "Bearer open sesame"}):
            assert (await ask_from("192.0.2.1", app, path, good)).status_code == 200
    assert set((await ask_from("192.0.2.1", app, "/health")).json()) == {"status", "num_ready"}
    assert (await ask_from("192.0.2.1", app, "/ready")).status_code == 503  # no replica, and no key needed to hear it
    without = create_app(GatewaySettings(**values, secret=""))
    assert (await ask_from("192.0.2.1", without, "/metrics", {"x-warmgate-secret": ""})).status_code == 401


async def test_an_empty_secret_opens_no_administration() -> None:
    app = create_app(GatewaySettings(replicas=[REPLICA], access_log="", secret=""))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post("/admin/drain", headers={"x-warmgate-secret": ""})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_secret")


def test_what_a_request_may_need_is_estimated() -> None:
    def parsed(**fields: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], **fields}
        return parse_request("chat", json.dumps(body).encode())

    prompt, output = estimate(parsed())
    assert 100 <= prompt <= 130
    assert output == EXPECTED_OUTPUT_TOKENS
    assert estimate(parsed(max_tokens=7, n=3))[1] == 21
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}, image]}]
    assert 1000 < estimate(parsed(messages=messages))[0] < 2000


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.02, 1), (1.0, 1), (4.1, 5), (4.9, 5), (60.01, 61)])
async def test_who_sleeps_as_long_as_retry_after_says_is_never_early(wait_s: float, seconds: int) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = Answer({"type": "http"}, send)
    await answer.error(refusal(Denied(Limit.TOKENS, "key a", 10, 9, 5, wait_s)))
    assert dict(sent[0]["headers"])[b"retry-after"] == b"%d" % seconds


def test_only_what_becomes_prompt_is_estimated() -> None:
    def tokens(endpoint: Any = "chat", **fields: Any) -> int:
        return estimate(parse_request(endpoint, json.dumps({"model": "m", **fields}, ensure_ascii=False).encode()))[0]

    text = {"type": "text", "text": "x" * 400}
    plain = tokens(messages=[{"role": "user", "content": "x" * 400}])
    assert plain == 101
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"description": "y" * 6000}}}
    assert tokens(messages=[{"role": "user", "content": [text]}], user="u" * 6000, response_format=schema) == plain
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 6000}}
    assert tokens(messages=[{"role": "user", "content": [text, image, image]}]) == plain + 2 * TOKENS_PER_MEDIUM
    tool = {"type": "function", "function": {"name": "f", "description": "z" * 4000}}
    assert plain + 1000 < tokens(messages=[{"role": "user", "content": "x" * 400}], tools=[tool]) < plain + 1100
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "a" * 4000}}
    assert 1000 < tokens(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]) < 1100
    assert tokens("completions", prompt="x" * 400) == 100
    assert tokens("completions", prompt="\u00e4" * 400) == 200, "bytes of UTF-8"
    assert tokens("completions", prompt=[7] * 50) == 50
    assert tokens("completions", prompt=[[7] * 50, [8] * 30]) == 80
    assert tokens("completions", prompt=["x" * 40, "y" * 80]) == 30
    assert tokens("embeddings", input=["x" * 40, "y" * 80], user="u" * 6000) == 30


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (59.2, "1m0s"), (1.5, "2s"), (360, "6m0s"), (7322, "2h2m2s")],
)
def test_durations_as_openai_writes_them(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


def test_refusals_say_what_helps() -> None:
    for limit, wait, code in (
        (Limit.REQUESTS, 2.0, "rate_limit_exceeded"),
        (Limit.TOKENS, 2.0, "rate_limit_exceeded"),
        (Limit.TOKENS, None, "rate_limit_exceeded"),
        (Limit.CONCURRENCY, 1.0, "rate_limit_exceeded"),
        (Limit.BUDGET, None, "insufficient_quota"),
        (Limit.BUDGET, 99.0, "insufficient_quota"),
    ):
        error = refusal(Denied(limit, "tenant acme", 10, 9, 5, wait))
        assert (error.status, error.code, error.retry_after_s) == (429, code, wait)
        assert (error.should_retry is False) == (wait is None or limit is Limit.BUDGET)
        assert "tenant" in error.message


def test_a_replicas_room_is_what_it_runs_while_others_wait_there() -> None:
    room = Room()
    room.reported(8, 3)
    assert room.num_slots == 0  # perhaps they came this very moment
    room.reported(8, 3)
    assert room.num_slots == 10
    room.reported(40, 1)
    assert room.num_slots == 50
    room.reported(40, 0)
    assert room.num_slots == 100
    for _ in range(10):
        room.reported(40, 0)
        assert room.num_slots <= FORGET
    assert room.num_slots == 0
    room.reported(0, 5)
    room.reported(0, 5)  # it is starting, or stuck: that says nothing of its room
    assert room.num_slots == 0
