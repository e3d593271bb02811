"""Each engine's endpoints, read as that engine writes them, and what the monitor and the cuts make of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import msgspec
import pytest

from engine_worker.contract.prompt import PromptError, PromptRenderer
from engine_worker.contract.state import WorkerState
from gateway.config import GatewaySettings
from gateway.observe.metrics import FleetGauges, Metrics
from gateway.prefix.service import PrefixService
from gateway.replicas.cuts import CutMaker, read_bundle
from gateway.replicas.detect import detect
from gateway.replicas.dialect import MAX_COUNT, ControlClient, PollError, read_labels, read_samples
from gateway.replicas.health import Monitor
from gateway.replicas.registry import Registry
from policies.events import Event, Joined, Restarted, StatsReported, StatusChanged
from policies.types import ReplicaStatus
from tests.gateway.harness import until
from tests.support.tiny_tokenizer import tiny_bundle

VLLM_METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="8192"} 1.0
process_start_time_seconds 1.76e+09
"""
SGLANG_METRICS = """sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 7.0
sglang:token_usage{model_name="m"} 0.5
"""
LLAMACPP_METRICS = """llamacpp:requests_processing 1
llamacpp:requests_deferred 4
llamacpp:kv_cache_usage_ratio 0.75
"""

Answers = dict[str, object]


def models(owner: str) -> dict[str, object]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner}]}


def client_of(answers: Answers) -> ControlClient:
    """A replica that answers what `answers` holds for a path: JSON, text, a status, or an exception."""

    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers.get(request.url.path, 404)
        if isinstance(answer, Callable):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        if isinstance(answer, int):
            return httpx.Response(answer)
        if isinstance(answer, str):
            return httpx.Response(200, text=answer)
        return httpx.Response(200, content=msgspec.json.encode(answer))

    return ControlClient(httpx.AsyncClient(transport=httpx.MockTransport(handle)), "http://r:1", 1.0, "s3", "key")


def state(**fields: object) -> WorkerState:
    values = {"status": "ready", "incarnation": "i1", "version": "1", "model": "m", "block_size": 16}
    return WorkerState(**{**values, "num_blocks": 100, "num_free_blocks": 75, **fields})


STATE = state(
    num_running=2,
    num_waiting=1,
    queued_prefill_tokens=50,
    step_tokens=512,
    max_num_seqs=8,
    served_models=["m", "alias"],
)
ENGINES: dict[str, tuple[Answers, dict[str, object]]] = {
    "warmgate": (
        {"/internal/state": STATE},
        {"num_running": 2, "num_waiting": 1, "kv_usage": 0.25, "queued_prefill_tokens": 50, "incarnation": "i1",
         "block_tokens": 16, "num_blocks": 100, "step_tokens": 512, "num_seats": 8, "models": {"m", "alias"}},
    ),
    "vllm": (
        {"/v1/models": models("vllm"), "/metrics": VLLM_METRICS},
        {"num_running": 4, "num_waiting": 2, "kv_usage": 0.25, "block_tokens": 16, "num_blocks": 8192,
         "incarnation": "1760000000.00", "models": {"m"}},
    ),
    "sglang": (
        {"/v1/models": models("sglang"), "/metrics": SGLANG_METRICS,
         "/get_server_info": {"page_size": 64, "max_total_num_tokens": 6400}},
        {"num_running": 5, "num_waiting": 7, "kv_usage": 0.5, "block_tokens": 64, "num_blocks": 100},
    ),
    "llamacpp": (
        {"/v1/models": models("llamacpp"), "/metrics": LLAMACPP_METRICS, "/health": {"status": "ok"}},
        {"num_running": 1, "num_waiting": 4, "kv_usage": 0.75, "has_load": True},
    ),
    "generic": ({"/v1/models": models("somebody")}, {"has_load": False, "models": {"m"}, "incarnation": ""}),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engine_is_recognised_and_read(engine):
    answers, expected = ENGINES[engine]
    dialect = await detect(client_of(answers), "auto")
    assert dialect.name == engine
    report = await dialect.poll()
    assert report.status is ReplicaStatus.READY
    assert {name: getattr(report, name) for name in expected} == expected


@pytest.mark.parametrize("number", [-1, 10**400])
async def test_numbers_that_nothing_can_have_are_bounded(number):
    """One replica's must not become an error in the cost of another."""
    fields = ("num_blocks", "num_free_blocks", "block_size", "num_running", "num_waiting", "step_tokens")
    fields = (*fields, "max_num_seqs", "queued_prefill_tokens")
    for field in fields:
        told = msgspec.json.encode(msgspec.structs.replace(STATE, **{field: 123454321}))
        answer = httpx.Response(200, content=told.replace(b"123454321", str(number).encode()))
        check_sane(await (await detect(client_of({"/internal/state": answer}), "warmgate")).poll())


@pytest.mark.parametrize("number", ["-1", "NaN", "+Inf", "1e999"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
async def test_samples_that_nothing_can_have_are_bounded(engine, number):
    answers = dict(ENGINES[engine][0])
    lines = str(answers["/metrics"]).splitlines()
    answers["/metrics"] = "\n".join(f"{line.rpartition(' ')[0]} {number}" for line in lines if "config" not in line)
    check_sane(await (await detect(client_of(answers), "auto")).poll())


def check_sane(report):
    told = (report.num_blocks, report.block_tokens, report.num_running, report.num_waiting, report.step_tokens)
    assert all(0 <= number <= MAX_COUNT for number in (*told, report.num_seats, report.queued_prefill_tokens or 0))
    assert 0.0 <= report.kv_usage <= 1.0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
async def test_an_engine_without_metrics_is_served_without_load(engine):
    answers = {**ENGINES[engine][0], "/metrics": 404, "/get_server_info": 404}
    report = await (await detect(client_of(answers), "auto")).poll()
    assert report.status is ReplicaStatus.READY
    assert not report.has_load


async def test_llamacpp_is_loading_until_its_health_says_otherwise():
    answers = {**ENGINES["llamacpp"][0], "/health": 503}
    assert (await (await detect(client_of(answers), "auto")).poll()).status is ReplicaStatus.LOADING


@pytest.mark.parametrize(("name", "status"), [("loading", "loading"), ("draining", "draining"), ("failed", "down")])
async def test_a_workers_own_status(name, status):
    report = await (await detect(client_of({"/internal/state": state(status=name)}), "warmgate")).poll()
    assert report.status.value == status


@pytest.mark.parametrize(
    ("answer", "words"), [(401, "WARMGATE_SECRET"), (httpx.ReadTimeout("slow"), "no answer"), (500, "404")]
)
async def test_a_replica_that_can_not_be_read_says_why(answer, words):
    with pytest.raises(PollError, match=words):
        await detect(client_of({"/internal/state": answer}), "auto")


async def test_the_secret_and_the_replicas_key_go_along():
    seen: dict[str, str] = {}

    def answer(request: httpx.Request) -> WorkerState:
        seen.update(request.headers)
        return state()

    await (await detect(client_of({"/internal/state": answer}), "warmgate")).poll()
    assert seen["x-warmgate-secret"] == "s3"
    assert seen["authorization"] == "Bearer key"


def test_only_the_samples_asked_for_are_read():
    text = 'a{x="1 } b"} 2\na{y="2"} 3 1700000000\nab 9\nb nan-ish\nc\n'
    assert read_samples(text, frozenset({"a", "b", "c"})) == {"a": 5.0}
    assert read_labels('info{a="1",b="x,y"} 1\n', "info") == {"a": "1", "b": "x,y"}
    assert read_labels("", "info") == {}


class Fleet:
    """A monitor over one mocked replica, with the events that it causes."""

    def __init__(self, answers: Answers, **spec: object) -> None:
        self.events: list[Event] = []
        self.answers = dict(answers)
        settings = GatewaySettings(
            replicas=[{"url": "http://r:1", **spec}], poll_interval_s=0.01, poll_failures=2, stuck_after_s=0.05
        )
        self.metrics = Metrics(FleetGauges)
        self.prefix = PrefixService()
        self.registry = Registry(settings.replicas, self.events.append, lambda: 0.0)
        cuts = CutMaker(self.prefix, self.metrics, self.events.append, lambda: 0.0)
        self.monitor = Monitor(settings, self.registry, cuts)
        (self.replica,) = self.registry

    async def __aenter__(self) -> Fleet:
        self.monitor.start(client_of(self.answers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.monitor.close()
        self.prefix.close()

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


async def test_a_report_becomes_events():
    async with Fleet(ENGINES["vllm"][0]) as fleet:
        await until(lambda: fleet.count(StatsReported) > 2)
        assert fleet.count(Joined) == 1
        joined = fleet.events[0]
        assert joined.models == frozenset({"m"})
        assert joined.num_blocks * joined.block_tokens == 8192 * 16, "capacity in the blocks of its keys, not its own"
        assert fleet.replica.key_mode == "text"


async def test_another_incarnation_is_a_restart_and_joins_anew():
    async with Fleet({"/internal/state": state()}) as fleet:
        await until(lambda: fleet.count(StatsReported))
        fleet.answers["/internal/state"] = state(incarnation="i2")
        await until(lambda: fleet.count(Restarted) == 1 and fleet.count(Joined) == 2)
        assert fleet.replica.incarnation == "i2"
        assert fleet.replica.status is ReplicaStatus.READY


async def test_a_refused_connection_is_down_at_once_and_what_comes_back_is_another_process():
    async with Fleet(ENGINES["generic"][0]) as fleet:
        await until(lambda: fleet.replica.joined)
        working = dict(fleet.answers)
        fleet.answers.clear()
        fleet.answers.update({"/v1/models": httpx.ConnectError("refused"), "/internal/state": httpx.ConnectError("x")})
        await until(lambda: fleet.replica.status is ReplicaStatus.DOWN)
        assert "/internal/state" not in fleet.replica.detail, "a path that this engine never had"
        fleet.answers.clear()
        fleet.answers.update(working)
        await until(lambda: fleet.replica.status is ReplicaStatus.READY)
        assert fleet.count(Restarted) == 1


async def test_a_single_slow_poll_is_forgiven_and_a_silent_replica_loses_its_waiters():
    class Waiter:
        reason = None

        def interrupt(self, reason: object) -> None:
            self.reason = reason

    async with Fleet(ENGINES["generic"][0]) as fleet:
        await until(lambda: fleet.replica.joined)
        waiter = Waiter()
        fleet.replica.waiting.add(waiter)
        slow = iter([httpx.ReadTimeout("slow")])
        good = fleet.answers["/v1/models"]
        fleet.answers["/v1/models"] = lambda request: next(slow, good)
        await until(lambda: next(slow, None) is None)
        assert fleet.count(StatusChanged) == 0
        fleet.answers["/v1/models"] = httpx.ReadTimeout("slow")
        await until(lambda: fleet.replica.status is ReplicaStatus.DOWN)
        await until(lambda: waiter.reason is not None)
        assert fleet.count(Restarted) == 0


async def test_never_the_wrong_model():
    """Row 17."""
    async with Fleet(ENGINES["generic"][0], model="other") as fleet:
        await until(lambda: "serves m, not other" in fleet.replica.detail)
        assert not fleet.replica.joined


def worker_with_tokenizer(wrong: bool = False) -> Answers:
    bundle = tiny_bundle()
    renderer = PromptRenderer(bundle)

    def tokenize(request: httpx.Request) -> object:
        body = json.loads(request.content)
        try:
            if "messages" in body:
                text = renderer.render_chat(
                    body["messages"], body.get("tools"), add_generation_prompt=body["add_generation_prompt"]
                )
            else:
                text = body["prompt"]
        except PromptError:
            return 400
        ids = renderer.encode(text, body["add_special_tokens"])
        return {"tokens": [*ids, 1] if wrong else ids, "count": len(ids)}

    return {"/internal/state": state(), "/internal/tokenizer": bundle, "/tokenize": tokenize}


async def test_a_worker_that_tokenizes_as_we_do_is_served_in_token_mode():
    async with Fleet(worker_with_tokenizer()) as fleet:
        await until(lambda: fleet.replica.joined)
        assert fleet.replica.key_mode == "token"
        assert fleet.replica.block_tokens == 16


async def test_a_worker_that_tokenizes_otherwise_is_served_in_text_mode_with_a_warning(caplog):
    async with Fleet(worker_with_tokenizer(wrong=True)) as fleet:
        await until(lambda: fleet.replica.joined)
        assert fleet.replica.key_mode == "text"
        assert "probe" in caplog.text
        assert "text mode: its tokens for the probe" in fleet.replica.remarks
        assert b'warmgate_parity_mismatches_total{replica="r:1"} 1.0' in fleet.metrics.render()


@pytest.mark.parametrize("tokenize", [404, {"input_ids": [1, 2]}, ["no", "object"]])
async def test_a_replica_without_tokenize_is_taken_on_trust(caplog, tokenize):
    answers = {**worker_with_tokenizer(), "/tokenize": tokenize}
    async with Fleet(answers) as fleet:
        await until(lambda: fleet.replica.joined)
        assert fleet.replica.key_mode == "token"
        assert "on trust" in caplog.text


async def test_a_worker_under_another_name_is_asked_by_a_name_that_it_serves(caplog):
    answers = worker_with_tokenizer()
    tokenize, asked = answers["/tokenize"], set()

    def strict(request: httpx.Request) -> object:
        asked.add(json.loads(request.content)["model"])
        return tokenize(request)

    state_of_mini = state(served_models=["mini", "tiny"])
    async with Fleet({**answers, "/internal/state": state_of_mini, "/tokenize": strict}) as fleet:
        await until(lambda: fleet.replica.joined)
        assert fleet.replica.key_mode == "token"
    assert asked == {"mini"}
    assert "on trust" not in caplog.text


@pytest.mark.parametrize("error", [{"code": "model_not_found"}, {"code": 404, "param": "model"}])
async def test_a_refusal_of_the_model_is_not_taken_for_a_missing_endpoint(caplog, error):
    refusal = httpx.Response(404, json={"error": {"message": "no such model", **error}})
    async with Fleet({**worker_with_tokenizer(), "/tokenize": lambda request: refusal}) as fleet:
        await until(lambda: fleet.replica.joined)
    assert "doesn't know its own model 'm' in /tokenize: its tokenizer is taken on trust" in caplog.text
    assert "has no /tokenize" not in caplog.text


async def test_a_replica_whose_tokenize_fails_is_asked_again():
    answers = {**worker_with_tokenizer(), "/tokenize": 503}
    async with Fleet(answers) as fleet:
        await until(lambda: "no tokens" in fleet.replica.detail)
        assert not fleet.replica.joined
        fleet.answers.update(worker_with_tokenizer())
        await until(lambda: fleet.replica.joined)


async def test_a_configured_tokenizer_folder_gives_other_engines_token_mode(tmp_path):
    bundle = tiny_bundle()
    (tmp_path / "tokenizer.json").write_text(bundle.tokenizer_json)
    config = {"chat_template": bundle.chat_template, "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = read_bundle(tmp_path)
    assert read.chat_template == bundle.chat_template
    assert read.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    async with Fleet(ENGINES["vllm"][0], tokenizer=tmp_path) as fleet:
        await until(lambda: fleet.replica.joined)
        assert (fleet.replica.key_mode, fleet.replica.block_tokens) == ("token", 16)
        assert fleet.replica.remarks == ""
    (tmp_path / "empty").mkdir()
    async with Fleet(ENGINES["vllm"][0], tokenizer=tmp_path / "empty") as fleet:
        await until(lambda: fleet.replica.joined)
        assert fleet.replica.key_mode == "text"
        words = f"it is served in text mode: {tmp_path / 'empty'} has no readable tokenizer.json"
        assert fleet.replica.remarks == words


async def test_a_closed_monitor_leaves_no_task_behind():
    before = len(asyncio.all_tasks())
    async with Fleet(ENGINES["generic"][0]) as fleet:
        await until(lambda: fleet.replica.joined)
    assert len(asyncio.all_tasks()) == before


async def test_a_connection_that_is_reset_at_once_is_a_failed_poll() -> None:
    """By a replica that dies then. anyio finds no socket where uvloop has closed it by then."""

    def gone(request: httpx.Request) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    async with httpx.AsyncClient(transport=httpx.MockTransport(gone)) as client:
        with pytest.raises(PollError, match="/v1/models: the connection was reset at once"):
            await ControlClient(client, "http://r:1", 1.0, None, None).get("/v1/models")
