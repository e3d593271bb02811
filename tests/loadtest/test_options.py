"""Numbers that a command can't work with are refused at once, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from loadtest import demo, soak, validate
from loadtest.chaos import cli as chaos
from loadtest.fleet import cli as fleet
from loadtest.sim import cli as replay
from loadtest.streams import cli as streams

Main = Callable[[list[str]], int]
TRACE = ("--trace", "nowhere.jsonl")
AT_LEAST_ONE: list[tuple[Main, Sequence[str], Sequence[str]]] = [
    (demo.main, (), ("conversations", "turns", "workers", "concurrency")),
    (chaos.main, (), ("requests", "clients")),
    (streams.main, ("idle",), ("streams",)),
    (streams.main, ("slow",), ("readers", "rounds")),
    (streams.main, ("memory",), ("requests", "clients")),
    (soak.main, (), ("requests", "concurrency")),
    (validate.main, TRACE, ("requests", "workers", "threads", "max-model-len", "token-budget", "max-num-seqs")),
    (fleet.main, TRACE, ("rounds", "compress", "requests", "replicas", "blocks", "token-budget", "max-num-seqs")),
    (replay.main, TRACE, ("requests", "max-model-len", "replicas", "token-budget", "max-num-seqs")),
    (replay.main, TRACE, ("gateways", "seeds", "jobs")),
]
OTHERS: list[tuple[Main, Sequence[str], str, str]] = [
    *((replay.main, TRACE, name, "-1") for name in ("mtbf", "poll", "share-delay", "feed-delay", "ramp", "max-think")),
    *((replay.main, TRACE, name, "-1") for name in ("think-scale", "ttft-objective", "joint-prefill-tokens")),
    *((replay.main, TRACE, name, "0") for name in ("duration", "mttr")),
    (replay.main, TRACE, "mtbf", "nan"),
    (replay.main, TRACE, "feed-loss", "3"),
    (replay.main, TRACE, "feed-loss", "-0.1"),
    (chaos.main, (), "duration", "0"),
    (chaos.main, (), "every", "0"),
    (chaos.main, (), "token-s", "-1"),
    (streams.main, ("idle",), "hold", "0"),
    (streams.main, ("slow",), "phase", "-1"),
    (validate.main, TRACE, "rate", "0"),
    (fleet.main, TRACE, "speedup", "0"),
    (fleet.main, TRACE, "users", "-1"),
    (demo.main, (), "turns", "many"),
]
CASES = [*OTHERS, *((main, given, name, "0") for main, given, names in AT_LEAST_ONE for name in names)]


@pytest.mark.parametrize(
    ("main", "given", "name", "value"), CASES, ids=[f"{main.__module__}-{name}={v}" for main, _, name, v in CASES]
)
def test_a_number_out_of_bounds_is_refused_in_one_sentence(
    main: Main, given: Sequence[str], name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*given, f"--{name}={value}"])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--{name}: " in line
    assert value in line
