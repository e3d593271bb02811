"""When to start, restart, stop and give up: a state machine without I/O.

Events go in with the time they happened (`child_ready`, `child_exited`, `stop`, `poll`), actions come out; the driver
carries them out. A child moves

    WAITING -> STARTING -> READY            start, then its probe succeeds
    STARTING | READY -> WAITING             it died: started again after a back-off that doubles
    STARTING -> LOST                        it died `max_failures` times in a row without staying up
    STARTING | READY -> STOPPING -> STOPPED on stop: asked with SIGTERM, forced with SIGKILL after the grace

Two kinds of death mean different things. Before everything was ready once, a child that exits by itself (a wrong
option, a missing model, no memory) has said what is wrong: starting it again would say it again, so all of it stops
with that sentence. A child that was killed by a signal, or that dies once the fleet has been up, is started again.
A death is forgotten when the child has stayed ready for `stable_s`. The fleet goes on without a lost worker while
another one is left; a lost gateway, or no worker left, stops it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ChildState(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    LOST = "lost"


RUNNING = frozenset({ChildState.STARTING, ChildState.READY, ChildState.STOPPING})


class Role(StrEnum):
    GATEWAY = "gateway"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class RestartRules:
    """Seconds, and how many deaths in a row are one too many."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_failures: int = 5
    stable_s: float = 60.0
    grace_s: float = 40.0  # children let requests in flight finish for 30 s

    def delay_s(self, num_failures: int) -> float:
        return float(min(self.first_delay_s * 2 ** (num_failures - 1), self.max_delay_s))


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the child's whole process group."""

    name: str
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class Say:
    """A sentence for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every child is ready for the first time."""


Action = Start | Signal | Say | AllReady


@dataclass(slots=True)
class Child:
    name: str
    role: Role
    state: ChildState = ChildState.WAITING
    num_failures: int = 0
    due_at: float = 0.0
    ready_at: float = 0.0


class Supervisor:
    """The machine. `exit_code` is None until every child has stopped; `failure` is the sentence for a non-zero one."""

    def __init__(self, children: Iterable[tuple[str, Role]], rules: RestartRules = RestartRules()) -> None:
        self.rules = rules
        self.children = {name: Child(name, role) for name, role in children}
        self.failure: str | None = None
        self._was_ready = False
        self._stop_at: float | None = None
        self._forced = False
        assert self.children, "nothing to supervise"

    @property
    def was_ready(self) -> bool:
        return self._was_ready

    @property
    def stopping(self) -> bool:
        return self._stop_at is not None

    @property
    def exit_code(self) -> int | None:
        if not self.stopping or any(child.state in RUNNING for child in self.children.values()):
            return None
        return 1 if self.failure else 0

    def next_due(self) -> float | None:
        """When `poll` has something to do next, or None."""
        due = [child.due_at for child in self.children.values() if child.state is ChildState.WAITING]
        if self._stop_at is not None and not self._forced:
            due.append(self._stop_at + self.rules.grace_s)
        return min(due, default=None)

    def poll(self, now: float) -> list[Action]:
        """Start what is due; force what did not stop within the grace."""
        actions: list[Action] = []
        for child in self.children.values():
            if child.state is ChildState.WAITING and child.due_at <= now and not self.stopping:
                child.state = ChildState.STARTING
                actions.append(Start(child.name))
        if self._stop_at is not None and not self._forced and now >= self._stop_at + self.rules.grace_s:
            actions += self._force("did not stop in time; killing it")
        return actions

    def child_ready(self, name: str, now: float) -> list[Action]:
        child = self.children[name]
        if child.state is not ChildState.STARTING:
            return []
        child.state, child.ready_at = ChildState.READY, now
        if self._was_ready:
            return [Say(f"{name} is back in service.")]
        if all(other.state is ChildState.READY for other in self.children.values()):
            self._was_ready = True
            return [AllReady()]
        return []

    def child_exited(self, name: str, status: int, now: float, last_words: str = "") -> list[Action]:
        """A child's process ended. `status` is negative for a signal, as subprocess has it."""
        child = self.children[name]
        assert child.state in RUNNING, f"{name} exited in state {child.state}"
        if child.state is ChildState.STOPPING:
            child.state = ChildState.STOPPED
            return []
        if child.state is ChildState.READY and now - child.ready_at >= self.rules.stable_s:
            child.num_failures = 0
        child.num_failures += 1
        if not self._was_ready and status >= 0:
            return self._give_up(child, f"{name} {_how(status)}: {last_words or 'it gave no reason'}", now)
        if child.num_failures >= self.rules.max_failures:
            return self._lose(child, status, last_words, now)
        delay = self.rules.delay_s(child.num_failures)
        child.state, child.due_at = ChildState.WAITING, now + delay
        return [Say(f"{name} {_how(status)}; starting it again in {delay:g} s.{_memory_hint(child, status)}")]

    def stop(self, now: float) -> list[Action]:
        """Stop everything; asked a second time, at once."""
        if self.stopping:
            return [] if self._forced else self._force("killed")
        self._stop_at = now
        actions: list[Action] = []
        for child in self.children.values():
            if child.state in RUNNING:
                child.state = ChildState.STOPPING
                actions.append(Signal(child.name, signal.SIGTERM))
            elif child.state is ChildState.WAITING:
                child.state = ChildState.STOPPED
        return actions

    def fail(self, sentence: str, now: float) -> list[Action]:
        """Stop everything because of something that restarting can't mend."""
        self.failure = self.failure or sentence
        return [] if self.stopping else self.stop(now)

    def _lose(self, child: Child, status: int, last_words: str, now: float) -> list[Action]:
        sentence = (
            f"{child.name} {_how(status)} {child.num_failures} times in a row without staying up"
            f"{': ' + last_words if last_words else '.'}{_memory_hint(child, status)}"
        )
        child.state = ChildState.LOST
        workers = [c for c in self.children.values() if c.role is Role.WORKER]
        if not self._was_ready or child.role is Role.GATEWAY or all(c.state is ChildState.LOST for c in workers):
            return self._give_up(child, sentence, now)
        return [Say(f"{sentence} It stays down; the others go on.")]

    def _give_up(self, child: Child, sentence: str, now: float) -> list[Action]:
        child.state = ChildState.LOST
        return self.fail(sentence, now)

    def _force(self, why: str) -> list[Action]:
        self._forced = True
        actions: list[Action] = []
        for child in self.children.values():
            if child.state is ChildState.STOPPING:
                actions += [Say(f"{child.name} {why}."), Signal(child.name, signal.SIGKILL)]
        return actions

    def check_invariants(self) -> None:
        states = {child.state for child in self.children.values()}
        if self.stopping:
            assert not states & {ChildState.WAITING, ChildState.STARTING, ChildState.READY}, states
        else:
            assert not states & {ChildState.STOPPING, ChildState.STOPPED}, states
            assert self.failure is None, self.failure
            gateways = [c for c in self.children.values() if c.role is Role.GATEWAY]
            assert all(c.state is not ChildState.LOST for c in gateways), "the gateway is lost and nothing stops"
        assert all(0 <= c.num_failures <= self.rules.max_failures for c in self.children.values())


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _memory_hint(child: Child, status: int) -> str:
    if child.role is Role.WORKER and status == -signal.SIGKILL and child.ready_at == 0.0:
        return (
            " A kill while loading is usually the system running out of memory: try fewer --workers or a smaller model."
        )
    return ""
