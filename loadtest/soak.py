"""A worker under everything at once: `python -m loadtest.soak --requests 2000`.

Starts a real worker (two processes) over a tiny model with random weights, speculation on, and a KV cache so small that
requests preempt each other. Sends it seeded, mixed requests: streamed and not, chats and completions, one choice and
several, greedy and sampled, stop strings, grammars, penalties, logprobs, prompts that share their beginnings, clients
that go away in the middle, and requests that must be refused. Every answer is checked against what was asked for.

At the end nothing may be left: no request, all blocks free, the engine's own check of its books passed, still the same
engine process, and as many sequences ended as were begun. Exit code 0 for that, 1 with the complaints otherwise.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.ending import bound_to_us, interrupted_by_signals
from loadtest.options import Parser, count
from loadtest.tiny_llama import write_tiny_llama

_MODEL = "soak"
_TEXT = "amber basil cedar delta ember fable grove heron inlet jasper kettle larch maple nettle opal pebble"
_WORDS = _TEXT.split()
_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["a", "b"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
_READY_S = 180.0
_IDLE_S = 120.0


@dataclass(slots=True)
class Tally:
    """What became of the requests. `complaints` are faults of the worker."""

    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    num_sequences: int = 0

    def expect(self, is_true: bool, complaint: str) -> None:
        if not is_true:
            self.complaints.append(complaint)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: where to, with what body. `leaves_after`: the client goes after so many chunks, or seconds / 100."""

    number: int
    path: str
    body: dict[str, Any]
    leaves_after: int | None
    is_refused: bool


def make_job(rng: random.Random, number: int) -> Job:
    """A request at random. The same generator state gives the same one."""
    is_chat = rng.random() < 0.4
    beginning = " ".join(_WORDS[: rng.choice([0, 4, 8, 16])] * rng.choice([1, 1, 2]))
    own = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 8)))
    text = f"{beginning} {own}".strip()
    body: dict[str, Any] = {"model": _MODEL, "max_tokens": rng.randint(1, 60)}
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    body |= rng.choice([{"temperature": 0}, {"temperature": 0}, {"seed": number}, {"temperature": 1.4, "top_p": 0.9}])
    if rng.random() < 0.25:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        body["stop"] = [rng.choice("aeiou"), "er"]
    if rng.random() < 0.15:
        body |= {"presence_penalty": 0.6, "frequency_penalty": 0.3}
    if rng.random() < 0.15:
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if rng.random() < 0.2:
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
        body |= {"response_format": shape, "max_tokens": 120}
        body.pop("stop", None)
    elif rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    is_refused = rng.random() < 0.03
    if is_refused:
        body |= rng.choice([{"temperature": -1}, {"max_tokens": 0}, {"n": 0}, {"model": "another"}])
    leaves = rng.randint(0, 20) if rng.random() < 0.12 and not is_refused else None
    return Job(number, "/v1/chat/completions" if is_chat else "/v1/completions", body, leaves, is_refused)


async def send(session: aiohttp.ClientSession, url: str, job: Job, tally: Tally) -> None:
    where = f"request {job.number}"
    try:
        async with session.post(url + job.path, json=job.body) as response:
            if job.is_refused:
                tally.outcomes["refused"] += 1
                tally.expect(response.status in (400, 404), f"{where}: {response.status} where a refusal was due")
                return
            if response.status != 200:
                tally.complaints.append(f"{where}: {response.status} {(await response.text())[:200]}")
                return
            if job.body.get("stream"):
                await _read_stream(response, job, tally, where)
            else:
                check_answer(await response.json(), job, tally, where)
    except (aiohttp.ClientError, TimeoutError) as error:
        tally.complaints.append(f"{where}: {type(error).__name__}: {error}")


async def _read_stream(response: aiohttp.ClientResponse, job: Job, tally: Tally, where: str) -> None:
    """Puts a stream's pieces together into what the whole answer would be."""
    texts: Counter[int] = Counter()
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] | None = None
    is_done, num_chunks = False, 0
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            is_done = True
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            tally.complaints.append(f"{where}: {chunk['error']['message']}")
            return
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            found = choices.setdefault(choice["index"], {"text": "", "finish_reason": None})
            delta = choice.get("delta") or {"content": choice.get("text")}
            found["text"] += delta.get("content") or ""
            texts[choice["index"]] += choice["finish_reason"] is not None
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
        num_chunks += 1
        if job.leaves_after is not None and num_chunks > job.leaves_after:
            tally.outcomes["left"] += 1
            response.close()
            return
    tally.expect(is_done, f"{where}: the stream ended without [DONE]")
    tally.expect(all(count == 1 for count in texts.values()), f"{where}: finish_reason not once a choice")
    check_answer({"choices": list(choices.values()), "usage": usage}, job, tally, where)


def check_answer(answer: dict[str, Any], job: Job, tally: Tally, where: str) -> None:
    """Holds a whole answer to its request."""
    body, choices, usage = job.body, answer["choices"], answer["usage"]
    tally.outcomes["answered"] += 1
    tally.expect(len(choices) == body.get("n", 1), f"{where}: {len(choices)} choices")
    most = body["max_tokens"] * body.get("n", 1)
    tally.expect(1 <= usage["completion_tokens"] <= most, f"{where}: {usage['completion_tokens']} tokens of {most}")
    for choice in choices:
        text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        reason = choice["finish_reason"]
        tally.expect(reason in ("stop", "length"), f"{where}: finish_reason {reason!r}")
        tally.expect(not any(stop in text for stop in body.get("stop", ())), f"{where}: a stop string in its text")
        if "response_format" in body and reason == "stop":
            tally.expect(_fits(text), f"{where}: {text!r} does not fit its schema")
            tally.outcomes["json"] += 1


def _fits(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"n", "s"} and 0 <= value["n"] <= 99 and value["s"] in ("a", "b")


async def run(url: str, num_requests: int, concurrency: int, seed: int) -> Tally:
    """All requests, then the account of what is left. A started worker must be idle and fresh."""
    tally, rng = Tally(), random.Random(seed)
    jobs = [make_job(rng, number) for number in range(num_requests)]
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        before = await _state(session, url)
        queue = iter(jobs)

        async def client() -> None:
            for job in queue:
                await _one(session, url, job, tally)

        await asyncio.gather(*(client() for _ in range(concurrency)))
        await _check_end(session, url, before, jobs, tally)
    return tally


async def _one(session: aiohttp.ClientSession, url: str, job: Job, tally: Tally) -> None:
    if job.leaves_after is None or job.body.get("stream"):
        await send(session, url, job, tally)
        return
    task = asyncio.create_task(send(session, url, job, tally))
    done, _ = await asyncio.wait({task}, timeout=job.leaves_after / 100)
    if not done:
        tally.outcomes["left"] += 1
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/internal/state") as response:
        found: dict[str, Any] = await response.json()
        return found


async def _check_end(
    session: aiohttp.ClientSession, url: str, before: dict[str, Any], jobs: list[Job], tally: Tally
) -> None:
    deadline = time.monotonic() + _IDLE_S
    while True:
        state = await _state(session, url)
        idle = state["num_running"] == state["num_waiting"] == 0 and state["num_free_blocks"] == state["num_blocks"]
        if (idle and state["num_idle_checks"] > before["num_idle_checks"]) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    tally.expect(idle, f"left over: {state['num_running']} running, {state['num_waiting']} waiting, "
                 f"{state['num_free_blocks']} of {state['num_blocks']} blocks free")  # fmt: skip
    tally.expect(state["num_idle_checks"] > before["num_idle_checks"], "the engine has not checked its books")
    tally.expect(state["incarnation"] == before["incarnation"], "the engine process has ended and was started again")
    async with session.get(f"{url}/health") as response:
        tally.expect(response.status == 200, f"/health says {response.status}")
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    ended = {
        line.partition('finished_reason="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:request_success_total{")
    }
    most = sum(job.body.get("n", 1) for job in jobs if not job.is_refused)
    least = sum(job.body.get("n", 1) for job in jobs if not job.is_refused and job.leaves_after is None)
    tally.num_sequences = int(sum(ended.values()))
    tally.expect(least <= tally.num_sequences <= most, f"{tally.num_sequences} sequences ended of {least} to {most}")
    tally.expect(ended.get("error", 0) == 0, f"{ended.get('error')} sequences failed")
    tally.outcomes["preemptions"] = state["num_preemptions"]
    if state["speculation"]:
        tally.outcomes["drafts accepted"] = state["speculation"]["num_accepted_tokens"]
        tally.outcomes["drafts refused"] = state["speculation"]["num_draft_tokens"] - tally.outcomes["drafts accepted"]


async def with_worker(num_requests: int, concurrency: int, seed: int, *options: str) -> Tally:
    """The same against a worker of our own. Raises RuntimeError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="warmgate-soak-") as folder:
        model = write_tiny_llama(Path(folder) / _MODEL)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = (
            sys.executable, "-m", "engine_worker", "--model", str(model), "--load-format", "dummy", "--port", str(port),
            "--kv-cache-memory", "256KiB", "--max-model-len", "1024",
            "--max-num-batched-tokens", "64", "--threads", "1",
            "--speculative", "ngram", "--ngram-min", "1", "--always-speculate", *options,
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(*bound_to_us(command), process_group=0)
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(url, process)
            return await run(url, num_requests, concurrency, seed)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + _READY_S
    async with aiohttp.ClientSession() as session:
        while process.returncode is None and time.monotonic() < deadline:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError("the worker did not start; its last lines say why")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m loadtest.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=count, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--concurrency", type=count, default=24, help="clients at once (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the mix (default %(default)s)")
    args = parser.parse_args(argv)
    interrupted_by_signals()
    try:
        tally = asyncio.run(with_worker(args.requests, args.concurrency, args.seed))
    except RuntimeError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{tally.num_sequences} sequences; " + ", ".join(f"{n} {what}" for what, n in tally.outcomes.items()))
    for complaint in tally.complaints[:20]:
        print(complaint, file=sys.stderr)
    return 1 if tally.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
