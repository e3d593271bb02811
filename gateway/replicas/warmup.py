"""Warm-up and hand-over: prompts are replayed where they will be needed, before they are.

Warm-up. A replica that is new to the fleet, or came back as another process, is given the hottest prompts (max_tokens
1) while its gate lets little else through (gate.py), until they are through or `warmup_s` is over.

Hand-over. A replica that is about to go keeps its sessions for a while: an administrator's drain with `over_s` moves a
growing share of the traffic elsewhere instead of all of it at once, and meanwhile the prompts that only it holds are
replayed on the replicas that the policy would give them to. One that drains by itself gets no new requests at once; its
prompts are replayed within `handover_s`.

Replays are requests like others for the fleet's state (leases, predictions, load), go one at a time, and wait while the
replicas are busy: they must not cost those that are served now. Without kept prompts (hot_prompts.py) only the shares
move.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.openai.fields import ParsedRequest
from gateway.prefix.service import PrefixService
from gateway.replicas.hot_prompts import HotPrompt, HotPrompts, hottest, replay_body
from gateway.replicas.registry import Registry, Replica
from gateway.router import Lease, NoReplica, Router
from gateway.upstream import Upstream, UpstreamError, request_headers
from policies.events import Event, FailureKind, Joined, StatusChanged
from policies.types import ReplicaId, ReplicaStatus, RouteRequest

_log = logging.getLogger("warmgate.replicas")
BUSY_S = 0.5  # prefill ahead on every candidate: replays wait
LOOK_S = 0.1
MIN_SHARE = 0.1  # of a prompt, that only the leaving replica holds
CAPACITY_SHARE = 0.5
UNKNOWN_CAPACITY_TOKENS = 100_000
MAX_ANSWER_BYTES = 4 * 1024 * 1024


class Warmer:
    """`start` nothing: it follows the router's events. `close` it on the event loop."""

    def __init__(
        self, prompts: HotPrompts, registry: Registry, router: Router, prefix: PrefixService, upstream: Upstream,
        warmup_s: float, handover_s: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.prompts = prompts
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._registry = registry
        self._router = router
        self._prefix = prefix
        self._upstream = upstream
        self._warmup_s = warmup_s
        self._handover_s = handover_s
        self._clock = clock
        self._seen: dict[ReplicaId, tuple[str, str]] = {}
        self._tasks: dict[tuple[str, ReplicaId], asyncio.Task[None]] = {}

    # What happens

    def served(self, parsed: ParsedRequest, path: str, lease: Lease) -> None:
        """A request got its whole answer."""
        if parsed.source is not None and parsed.model is not None:
            chain = lease.chain
            self.prompts.note(
                HotPrompt(path, parsed.model, parsed.body, parsed.source, chain.keys, chain.num_tokens, parsed.session)
            )

    def observe(self, event: Event) -> None:
        if isinstance(event, Joined) and event.status is ReplicaStatus.READY:
            identity = (event.incarnation, event.key_space)
            if self._seen.get(event.replica_id) != identity:
                self._seen[event.replica_id] = identity
                if len(self.prompts):
                    self._run("warmup", event.replica_id, self._warm_up)
        elif isinstance(event, StatusChanged) and event.status is ReplicaStatus.DRAINING and len(self.prompts):
            self._run("handover", event.replica_id, lambda r: self._hand_over(r, self._handover_s))

    def drain(self, replica: Replica, over_s: float) -> None:
        """Give `replica` ever less, and nothing after `over_s`; hand its prompts over meanwhile."""
        replica.gate.leave(self._clock(), over_s)
        self._router.gate_changed(replica)
        self._run("handover", replica.replica_id, lambda r: self._drain(r, over_s))

    def stay(self, replica: Replica) -> None:
        """The drain was called off."""
        replica.gate.stay()
        task = self._tasks.pop(("handover", replica.replica_id), None)
        if task is not None:
            task.cancel()

    def _run(self, kind: str, replica_id: ReplicaId, work: Callable[[Replica], Awaitable[None]]) -> None:
        previous = self._tasks.get((kind, replica_id))
        if previous is not None and not previous.done():
            if kind == "handover":
                return  # of a drain that has just come to its end: it is being handed over already
            previous.cancel()
        task = asyncio.create_task(self._guarded(kind, self._registry.get(replica_id), work))
        self._tasks[kind, replica_id] = task

    async def _guarded(self, kind: str, replica: Replica, work: Callable[[Replica], Awaitable[None]]) -> None:
        try:
            await work(replica)
        except Exception:
            _log.exception("%s of replica %s failed", kind, replica.replica_id)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    # The two ways

    async def _warm_up(self, replica: Replica) -> None:
        started, incarnation = self._clock(), replica.incarnation
        others = frozenset(other.replica_id for other in self._registry if other is not replica)
        capacity = replica.num_blocks * replica.block_tokens * CAPACITY_SHARE or UNKNOWN_CAPACITY_TOKENS
        chosen = await asyncio.to_thread(hottest, self.prompts.of(replica.models), int(capacity))
        num_done = 0
        for prompt in chosen:
            if self._clock() - started > self._warmup_s or replica.incarnation != incarnation:
                break
            num_done += await self._replay("warmup", prompt, others, started + self._warmup_s)
        _log.info("replica %s was warmed with %d of %d prompts", replica.replica_id, num_done, len(chosen))

    async def _drain(self, replica: Replica, over_s: float) -> None:
        until = self._clock() + over_s
        await self._hand_over(replica, over_s)
        await asyncio.sleep(max(until - self._clock(), 0.0))
        self._registry.drain(replica, True)
        replica.gate.stay()

    async def _hand_over(self, replica: Replica, over_s: float) -> None:
        """Replay what only `replica` holds elsewhere, spread over the time."""
        started, leaving = self._clock(), frozenset({replica.replica_id})
        prompts = self.prompts.of(replica.models)
        num_done = 0
        for number, prompt in enumerate(prompts):
            due = started + over_s * number / len(prompts)
            await asyncio.sleep(max(due - self._clock(), 0.0))
            if self._clock() - started > over_s:
                break
            request = await self._request(prompt, leaving)
            if request is not None and self._is_only_at(replica, request):
                num_done += await self._replay("handover", prompt, leaving, started + over_s)
        _log.info("replica %s handed %d prompts over", replica.replica_id, num_done)

    def _is_only_at(self, replica: Replica, request: RouteRequest) -> bool:
        """Whether the leaving replica holds more of the prompt than any other, by enough to matter."""
        chain = request.chains.get(replica.key_space)
        if chain is None:
            return False
        matched = self._router.fleet.index.match(chain.keys)
        others = max((blocks for name, blocks in matched.items() if name != replica.replica_id), default=0)
        return matched.get(replica.replica_id, 0) - others > MIN_SHARE * len(chain.keys)

    # One replay

    async def _request(self, prompt: HotPrompt, excluded: frozenset[ReplicaId]) -> RouteRequest | None:
        chains = await self._prefix.chains(prompt.source, self._registry.key_spaces(prompt.model))
        if not chains:
            return None
        return RouteRequest(
            request_id=self._router.new_id(), model=prompt.model, chains=chains, max_output_tokens=1,
            num_tokens=max(chain.num_tokens for chain in chains.values()), session=prompt.session, excluded=excluded,
            streamed=False,
        )  # fmt: skip

    async def _replay(self, kind: str, prompt: HotPrompt, excluded: frozenset[ReplicaId], until: float) -> bool:
        """Whether the prompt is warm on another replica now."""
        request = await self._request(prompt, excluded)
        if request is None or not await self._quiet(request, until):
            self.outcomes[kind, "skipped"] += 1
            return False
        try:
            lease = await self._router.place(request, max(until - self._clock(), 0.01))
        except NoReplica:
            self.outcomes[kind, "skipped"] += 1
            return False
        done = False
        try:
            async with asyncio.timeout(max(until - self._clock(), 0.01)):
                done = await self._post(lease, prompt)
        except (UpstreamError, TimeoutError):
            done = False
        finally:
            if lease.is_open:
                lease.fail(FailureKind.CANCELLED)  # says nothing about the replica: nobody asked for it
        self.outcomes[kind, "done" if done else "failed"] += 1
        return done

    async def _quiet(self, request: RouteRequest, until: float) -> bool:
        """Wait until some candidate has little to do. False when none had in time, or there is none."""
        while self._clock() < until:
            views = self._router.fleet.snapshot(request, self._clock()).replicas
            if not views:
                return False
            if min(view.queued_prefill_s for view in views) < BUSY_S:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _post(self, lease: Lease, prompt: HotPrompt) -> bool:
        replica = lease.replica
        name = f"replay-{lease.request_id}"
        headers = request_headers([(b"content-type", b"application/json")], name, replica.api_key)
        response = await self._upstream.post(replica.target(prompt.path), headers, replay_body(prompt.body))
        try:
            await response.read_all(MAX_ANSWER_BYTES)
            if response.status != 200:
                return False
            lease.finish(1, response.cached_tokens, None)
            return True
        finally:
            response.close()

    @property
    def num_tasks(self) -> int:
        return sum(not task.done() for task in self._tasks.values())


class WarmupCollector(Collector):
    def __init__(self, prompts: HotPrompts, outcomes: Callable[[], Sequence[tuple[tuple[str, str], int]]]) -> None:
        self._prompts = prompts
        self._outcomes = outcomes

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("warmgate_hot_prompts", "Prompts kept for replay.", len(self._prompts))
        yield GaugeMetricFamily("warmgate_hot_prompt_bytes", "Memory that they take.", self._prompts.num_bytes)
        family = CounterMetricFamily("warmgate_replays", "Prompts replayed on replicas.", labels=["kind", "outcome"])
        for labels, count in self._outcomes():
            family.add_metric(labels, count)
        yield family
