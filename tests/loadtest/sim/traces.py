"""Small traces made up by a seed, in the formats that the simulator reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from loadtest.sim.trace import Trace, TraceRequest

BLOCK = 512


def mooncake_rows(num_requests: int, seed: int = 1, rate: float = 4.0) -> list[dict[str, Any]]:
    """Conversations that grow: block 0 is everybody's, some requests continue an earlier one."""
    rng, rows, fresh = random.Random(seed), [], iter(range(1, 1 << 30))
    open_ids: list[list[int]] = []
    for number in range(num_requests):
        if open_ids and rng.random() < 0.5:
            ids = rng.choice(open_ids)
        else:
            ids = [0]
            open_ids.append(ids)
        ids += [next(fresh) for _ in range(rng.randint(1, 12))]
        tail = rng.randint(1, BLOCK - 1)
        row = {
            "timestamp": int(number / rate) // 3 * 3000,
            "input_length": len(ids) * BLOCK + tail,
            "output_length": rng.randint(1, 60),
            "hash_ids": [*ids, next(fresh)],
        }
        rows.append(row)
    return rows


def session_rows(num_sessions: int, seed: int = 1) -> list[dict[str, Any]]:
    """Agents whose prompt grows by turns behind a shared start."""
    rng, rows, fresh = random.Random(seed), [], 1000
    for number in range(num_sessions):
        requests, ranges, length, t = [], [[0, 9]], 10, 0.0
        for _ in range(rng.randint(2, 6)):
            more = rng.randint(1, 6)
            ranges = [*ranges, [fresh, fresh + more - 1]]
            fresh += more
            length += more
            think = rng.uniform(0.0, 3.0)
            t += think + 1.0
            requests.append(
                {"t": t, "think": think, "api": 1.0, "in": length * BLOCK + 7, "out": rng.randint(1, 50), "ids": ranges}
            )
        rows.append({"session": f"s{number}", "parent": None, "tool_sys_tokens": 5000, "requests": requests})
    return rows


def own_rows(num_requests: int, block_tokens: int = 16, seed: int = 1) -> list[dict[str, Any]]:
    rng, rows = random.Random(seed), []
    for number in range(num_requests):
        shared = list(range(100))
        prompt = shared + [rng.randrange(1000, 2000) for _ in range(rng.randint(1, 60))]
        rows.append(
            {"timestamp": number * 0.01, "prompt_ids": prompt, "num_output_tokens": 5, "block_tokens": block_tokens}
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def request(
    *block_ids: int, tail: int = 1, output: int = 4, at_s: float = 0.0, session: str = "", block_tokens: int = BLOCK
) -> TraceRequest:
    """A request with these full blocks and `tail` tokens more."""
    return TraceRequest(session, at_s, 0.0, len(block_ids) * block_tokens + tail, output, block_ids)


def timed(*requests: TraceRequest) -> Trace:
    return Trace("made up", "own", BLOCK, tuple((each,) for each in requests), timed=True)
