"""`warmgate up`'s driver over fake children: `python -m tests.support.fake_up '{"worker-1": "serve", ...}' PORT [DIR]`.

The real driver, screen, processes and signals; only the commands are ours. The child named gateway has that role.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from gateway.supervise.machine import RestartRules, Role
from gateway.supervise.plan import ChildSpec, UpOptions
from gateway.supervise.run import Driver
from gateway.supervise.screen import Screen

CHILD = str(Path(__file__).with_name("fake_child.py"))
RULES = RestartRules(first_delay_s=0.05, max_delay_s=0.2, max_failures=3, grace_s=1.0)


def main() -> int:
    stories, first_port = json.loads(sys.argv[1]), int(sys.argv[2])
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else Path("/nonexistent")
    specs = []
    for offset, (name, story) in enumerate(stories.items()):
        port = first_port + offset
        command = (sys.executable, CHILD, str(port), story, str(folder / name))
        role = Role.GATEWAY if name == "gateway" else Role.WORKER
        specs.append(ChildSpec(name, role, command, f"http://127.0.0.1:{port}", {}))
    options = UpOptions(model="m", num_workers=len(specs) - 1)
    return asyncio.run(Driver(specs, Screen(list(stories)), options, RULES).run())


if __name__ == "__main__":
    sys.exit(main())
