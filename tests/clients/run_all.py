"""Runs every client's tests against one gateway: `python -m tests.clients.run_all` (`make test-clients`).

Each environment is made once, under .warmgate/clients, and made anew when its packages change here. Clients that can't
live together have an environment each; so has each older major of openai-python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.conftest import BASE_VARIABLE, SCRIPTED_VARIABLE, running_stack
from tests.support.processes import ROOT

HOME = ROOT / ".warmgate/clients"
HERE = "tests/clients"
# Environment -> the packages in it, and the test files that run there.
PYTHON = {
    "frameworks": (
        ["langchain-openai", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "litellm", "pytest"],
        ["test_openai.py", "test_langchain.py", "test_llama_index.py", "test_litellm.py"],
    ),
    "openai-1": (["openai<2", "pytest"], ["test_openai.py"]),
}
NODE = ["openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"]


def run(command: list[str], **fields: object) -> int:
    print("$", *command, flush=True)
    return subprocess.run(command, **fields).returncode


def made(name: str, packages: list[str], commands: list[list[str]]) -> Path:
    """The environment's folder, with its packages in it. Raises SystemExit."""
    folder = HOME / name
    mark = folder / ".installed"
    wanted = "\n".join(packages)
    if not mark.is_file() or mark.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in commands:
            if run(command, cwd=folder):
                raise SystemExit(f"the clients' environment {name} could not be made")
        mark.write_text(wanted)
    return folder


def python_environment(name: str, packages: list[str]) -> Path:
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return made(name, packages, [[sys.executable, "-m", "venv", "."], ["bin/python", *quiet, *packages]])


def node_environment() -> Path:
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", *NODE]
    return made("node", NODE, [["npm", "init", "--yes", "--silent"], install])


def main() -> int:
    environments = {name: python_environment(name, packages) for name, (packages, _) in PYTHON.items()}
    node = node_environment() if shutil.which("node") and shutil.which("npm") else None
    failed = []
    with running_stack() as (base, scripted):
        addresses = {BASE_VARIABLE: base, SCRIPTED_VARIABLE: scripted}
        env = {**os.environ, **addresses, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        for name, (_, files) in PYTHON.items():
            command = [str(environments[name] / "bin/python"), "-m", "pytest", "-c", f"{HERE}/pytest.ini"]
            if run([*command, "--rootdir", ".", *(f"{HERE}/{file}" for file in files)], cwd=ROOT, env=env):
                failed.append(name)
        if node is None:
            failed.append("node (not installed)")
        elif run(["node", "--test", f"{HERE}/node/"], cwd=ROOT, env={**env, "WARMGATE_TEST_MODULES": str(node)}):
            failed.append("node")
    print("clients that failed:", ", ".join(failed) or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
