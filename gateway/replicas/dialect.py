"""What a replica says about itself, whatever engine it is: the shape that every dialect module translates into.

A dialect reads one engine's endpoints (`poll`) and knows nothing of routing. The monitor (health.py) turns reports
into fleet events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import httpx
import msgspec

from engine_worker.contract.state import TokenizerBundle
from policies.types import ReplicaStatus

MAX_COUNT: Final = 2**53  # what a float can tell from its neighbours, and far more than there is of anything


class PollError(Exception):
    """The replica did not give a usable answer. `refused`: nothing listens there, so its process is gone.

    `timed_out`: it accepted and said nothing, which a stopped or stuck process does.
    """

    def __init__(self, message: str, *, refused: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One poll's answer. Zero or empty: the engine doesn't say.

    base_model    the name of the model that the others are adapters of, where it is told
    incarnation   changes when the process behind the address does ("" when the engine has no such thing)
    block_tokens  its KV block size in tokens; `num_blocks` the blocks in all
    num_seats     requests that it computes at once
    step_tokens   tokens of a step, of an engine that serves the shortest first as it is told
    model_fingerprint
                  the same for workers that can go on with each other's answers
    has_load      whether num_running, num_waiting and kv_usage mean anything
    """

    status: ReplicaStatus
    models: frozenset[str]
    base_model: str = ""
    incarnation: str = ""
    block_tokens: int = 0
    num_blocks: int = 0
    step_tokens: int = 0
    num_seats: int = 0
    has_load: bool = False
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    queued_prefill_tokens: int | None = None
    tokenizer_fingerprint: str = ""
    model_fingerprint: str = ""
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    detail: str = ""

    def capacity_blocks(self, block_tokens: int) -> int:
        """The replica's KV capacity in blocks of `block_tokens`, which its own need not have: text keys have theirs."""
        if not self.block_tokens or not block_tokens:
            return self.num_blocks
        return self.num_blocks * self.block_tokens // block_tokens


class Dialect(Protocol):
    """How to read one engine. Stateless but for what it learned about this replica's endpoints."""

    @property
    def name(self) -> str: ...

    async def poll(self) -> Report:
        """Raises PollError."""
        ...

    async def tokenizer(self) -> TokenizerBundle | None:
        """The replica's own tokenizer, if it serves one. Raises PollError."""
        ...


class ControlClient:
    """GETs and POSTs to one replica, with the secret and a timeout; exceptions become PollError."""

    def __init__(
        self, client: httpx.AsyncClient, base_url: str, timeout_s: float, secret: str | None, api_key: str | None
    ) -> None:
        self._client = client
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._headers: dict[str, str] = {}
        if secret is not None:
            self._headers["x-warmgate-secret"] = secret
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def get(self, path: str, timeout_s: float | None = None) -> httpx.Response:
        return await self._request("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, object], timeout_s: float | None = None) -> httpx.Response:
        return await self._request("POST", path, msgspec.json.encode(body), timeout_s)

    async def _request(self, method: str, path: str, content: bytes | None, timeout_s: float | None) -> httpx.Response:
        headers = self._headers if content is None else {**self._headers, "content-type": "application/json"}
        try:
            return await self._client.request(
                method, self._base_url + path, content=content, headers=headers, timeout=timeout_s or self._timeout_s
            )
        except httpx.ConnectTimeout as error:
            raise PollError("connecting timed out", timed_out=True) from error
        except httpx.ConnectError as error:
            raise PollError(f"{error or 'connection refused'}", refused=True) from error
        except httpx.TimeoutException as error:
            raise PollError(f"{path}: no answer in {timeout_s or self._timeout_s:g} s", timed_out=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PollError(f"{path}: {error or type(error).__name__}") from error
        except AttributeError as error:  # so anyio says on uvloop that a connection was reset as soon as it was made
            raise PollError(f"{path}: the connection was reset at once ({error})") from error


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""


class ModelList(msgspec.Struct, frozen=True):
    data: list[_Model] = []

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(model.id for model in self.data)

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(model.owned_by for model in self.data)


async def fetch_models(client: ControlClient) -> ModelList:
    """GET /v1/models. Raises PollError."""
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise PollError(f"/v1/models answered {response.status_code}")
    try:
        return msgspec.json.decode(response.content, type=ModelList)
    except msgspec.DecodeError as error:
        raise PollError(f"/v1/models is not a model list ({error})") from error


def count(told: float) -> int:
    """How many that is, of a number that may be anything: every request's cost is reckoned with it, whatever replica
    the request goes to, so one that no float holds would be everybody's error."""
    if not told > 0:  # NaN as well
        return 0
    return int(told) if told < MAX_COUNT else MAX_COUNT


def read_samples(text: str, names: frozenset[str]) -> dict[str, float]:
    """Samples of a Prometheus page whose names are asked for, summed over their labels. Other lines aren't parsed."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in names:
            continue
        try:
            value = float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1])
        except (IndexError, ValueError):
            continue
        values[name] = values.get(name, 0.0) + value
    return values


def read_labels(text: str, name: str) -> dict[str, str]:
    """The labels of the first sample called `name` (values without escapes, as engines' info metrics have)."""
    for line in text.splitlines():
        if line.startswith(name + "{"):
            inside = line[len(name) + 1 : line.rindex("}")]
            pairs = (pair.partition("=") for pair in inside.split('",'))
            return {key.strip(): value.strip().strip('"') for key, _, value in pairs if key.strip()}
    return {}
