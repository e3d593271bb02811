"""Sections of checks and what they found, printed as it comes."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

_AGAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `ok` is None for a figure that nothing is asked of."""

    section: str
    name: str
    value: float | str
    unit: str = ""
    ok: bool | None = None

    def line(self) -> str:
        value = f"{self.value:,.4g}" if isinstance(self.value, float) else str(self.value)
        verdict = {None: "", True: "  ok", False: "  FAILED"}[self.ok]
        return f"  {self.name:<52} {value:>14} {self.unit}{verdict}"


class OutOfTime(BaseException):
    """A section outlived its budget. No Exception: code under check that goes on after errors must not catch it."""


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)
    json_path: Path | None = None
    section: str = ""

    def add(self, name: str, value: float | str, unit: str = "", ok: bool | None = None) -> None:
        row = Row(self.section, name, value, unit, ok)
        self.rows.append(row)
        print(row.line(), flush=True)
        self._save()

    def run(self, name: str, budget_s: float, section: Callable[[], None]) -> None:
        """One section; whatever it raises becomes a failed row."""
        self.section = name
        print(f"{name} (at most {budget_s:.0f} s)", flush=True)
        begin = time.perf_counter()
        try:
            with _limit(budget_s):
                section()
        except OutOfTime:
            self.add("the section", f"stopped after {budget_s:.0f} s", ok=False)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            self.add("the section", f"{type(error).__name__}: {str(error).strip()[:300]}", ok=False)
        print(f"  took {time.perf_counter() - begin:.1f} s", flush=True)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.ok is False]

    def _save(self) -> None:
        if self.json_path is not None:
            self.json_path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1))


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: where a destructor or a callback from C runs, what the handler raises is dropped.
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
