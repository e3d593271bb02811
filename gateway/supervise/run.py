"""The driver of `warmgate up`: processes and HTTP into the machine's events, its actions into processes and signals."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx

from gateway.supervise import plan, preflight
from gateway.supervise.machine import Action, AllReady, ChildState, RestartRules, Role, Say, Signal, Start, Supervisor
from gateway.supervise.plan import ChildSpec, UpOptions
from gateway.supervise.probe import probe
from gateway.supervise.process import ChildProcess
from gateway.supervise.screen import Screen, ready_message

PROBE_INTERVAL_S = 0.25


class Driver:
    """Runs a Supervisor until everything has stopped."""

    def __init__(self, specs: Sequence[ChildSpec], screen: Screen, options: UpOptions, rules: RestartRules) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._machine = Supervisor([(spec.name, spec.role) for spec in specs], rules)
        self._screen = screen
        self._options = options
        self._processes: dict[str, ChildProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._model = options.model

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup's SIGHUP stays ignored. SIGINT is ignored in any background job of a script; who sends it means it
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._asked_to_stop)
        timeout = httpx.Timeout(5.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            self._client = client
            try:
                while self._machine.exit_code is None:
                    self._do(self._machine.poll(loop.time()))
                    self._machine.check_invariants()
                    self._changed.clear()
                    await self._wait(loop)
            finally:
                self._kill_everything()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        self._screen.settle()
        if self._machine.failure:
            self._screen.say(self._machine.failure)
        return self._machine.exit_code

    async def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self._machine.next_due()
        try:
            await asyncio.wait_for(self._changed.wait(), None if due is None else max(0.0, due - loop.time()))
        except TimeoutError:
            return

    def _asked_to_stop(self) -> None:
        if not self._machine.stopping:
            self._screen.settle()
            self._screen.say("Stopping; requests in flight may finish. Once more stops at once.")
        self._do(self._machine.stop(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _do(self, actions: Sequence[Action]) -> None:
        self._changed.set()
        for action in actions:
            match action:
                case Start(name):
                    self._start(self._specs[name])
                case Signal(name, number):
                    self._processes[name].signal_group(number)
                case Say(text):
                    self._screen.say(text)
                case AllReady():
                    self._announce()

    def _start(self, spec: ChildSpec) -> None:
        process = ChildProcess(spec, self._screen.line)
        self._processes[spec.name] = process
        self._spawn(self._watch(process))
        self._spawn(self._probe_until_ready(process))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, process: ChildProcess) -> None:
        name = process.spec.name
        status = await process.exited()
        self._screen.progress(name, "stopped", "")
        self._do(self._machine.child_exited(name, status, self._now(), process.last_words()))

    async def _probe_until_ready(self, process: ChildProcess) -> None:
        """Ends when this process is ready or no longer the child's current one."""
        spec = process.spec
        while self._processes[spec.name] is process and self._machine.children[spec.name].state is ChildState.STARTING:
            progress = await probe(self._client, spec, all_replicas=not self._machine.was_ready)
            if self._machine.children[spec.name].state is not ChildState.STARTING:
                return
            if progress.failed and not self._machine.was_ready:
                self._do(self._machine.fail(f"{spec.name} can't start: {progress.detail}", self._now()))
                return
            self._screen.progress(spec.name, "ready" if progress.ready else "starting", progress.detail)
            if progress.ready:
                if spec.role is Role.GATEWAY:
                    self._model = progress.model
                self._do(self._machine.child_ready(spec.name, self._now()))
                return
            await asyncio.sleep(PROBE_INTERVAL_S)

    def _announce(self) -> None:
        self._screen.settle()
        gateway = next(spec for spec in self._specs.values() if spec.role is Role.GATEWAY)
        options = self._options
        make_key = preflight.key_command(preflight.gateway_settings(options))
        self._screen.verbatim(ready_message(gateway.url, self._model, options.num_workers, options.policy, make_key))

    def _kill_everything(self) -> None:
        for process in self._processes.values():
            process.signal_group(signal.SIGKILL)


def up(options: UpOptions) -> int:
    """Brings everything up and stays until asked to stop. Returns the exit code; problems are said on stderr."""
    try:
        preflight.check(options)
    except preflight.CannotStart as problem:
        print(problem, file=sys.stderr)
        return 1
    specs = plan.children(options)
    screen = Screen([spec.name for spec in specs])
    try:
        return asyncio.run(Driver(specs, screen, options, RestartRules()).run())
    finally:
        screen.settle()
