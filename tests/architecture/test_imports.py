"""The import table: what each package may know of the others. A crossing here is how a design rots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.imports import Import, imports_of, imports_under
from tests.support.processes import ROOT

TORCH = ("torch", "transformers", "safetensors", "gguf")


@dataclass(frozen=True, slots=True)
class Rule:
    """`ours` and `others` may be imported (`others` of None: any third-party package but `never`)."""

    folder: str
    ours: tuple[str, ...]
    others: tuple[str, ...] | None
    never: tuple[str, ...] = ()

    def forbids(self, found: Import) -> bool:
        if found.within(*self.never):
            return True
        if found.is_ours:
            return not found.within(*self.ours)
        return not found.is_stdlib and self.others is not None and not found.within(*self.others)


CONTRACT, CORE, MODEL = "engine_worker.contract", "engine_worker.core", "engine_worker.model"
CONFIG = "engine_worker.config"  # settings and what a model turned out to be: stdlib only, so every layer may know it
TABLE = [
    Rule("policies", ("policies",), ("xxhash",), never=("asyncio", "time")),
    Rule("engine_worker/contract", (CONTRACT,), ("msgspec", "tokenizers", "jinja2")),
    Rule("engine_worker/core", (CORE, CONTRACT), (), never=("asyncio", "time", "threading", "socket")),
    Rule("engine_worker/model", (MODEL, CORE, CONTRACT, CONFIG), None, never=("engine_worker.serving",)),
    Rule("engine_worker/serving", ("engine_worker",), None),
    Rule("gateway", ("gateway", "policies", CONTRACT), None, never=TORCH),
    Rule("loadtest", ("loadtest", "policies", CORE, CONTRACT), None, never=TORCH),
]


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.folder)
def test_no_import_crosses_the_table(rule: Rule) -> None:
    found = imports_under(rule.folder)
    assert found, f"{rule.folder} imports nothing at all: is the folder still there?"
    assert [str(each) for each in found if rule.forbids(each)] == []


def test_the_workers_settings_stay_in_the_standard_library() -> None:
    source = ROOT / "engine_worker/config.py"
    assert all(each.is_stdlib for each in imports_of(source.read_text(), source, "engine_worker"))


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("policies", "def f():\n    import time"),
        ("policies", "from ..gateway import app"),
        ("engine_worker/core", "import torch"),
        ("engine_worker/core", "from engine_worker.model import runner"),
        ("engine_worker/contract", "if TYPE_CHECKING:\n    import transformers"),
        ("engine_worker/model", "from engine_worker import serving"),
        ("gateway", "import importlib\nimportlib.import_module('torch.nn')"),
        ("gateway", "from engine_worker.core.types import Request"),
        ("loadtest", "from gateway.app import create_app"),
    ],
)
def test_the_walk_sees_a_crossing(folder: str, source: str) -> None:
    """The control: without it a walk that sees nothing would pass."""
    [rule] = [rule for rule in TABLE if rule.folder == folder]
    found = imports_of(source, ROOT / folder / "example.py", folder.replace("/", "."))
    assert any(rule.forbids(each) for each in found)


def loaded_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter that ran `code`."""
    script = f"{code}\nimport sys; print('LOADED', *{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("LOADED", 1)[1].split())


LOADERS: dict[str, Callable[[], str]] = {
    "gateway": lambda: (
        "from gateway.config import load_settings\nfrom gateway.app import create_app\nimport gateway.server\n"
        "create_app(load_settings({'replicas': ['http://127.0.0.1:9']}))"
    ),
    "supervisor": lambda: "import gateway.supervise.run",
    "contract": lambda: ";".join(f"import {name}" for name in modules_of("engine_worker/contract")),
    "core": lambda: ";".join(f"import {name}" for name in modules_of("engine_worker/core")),
    "policies": lambda: ";".join(f"import {name}" for name in modules_of("policies")),
}


def modules_of(folder: str) -> list[str]:
    files = (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))
    return [".".join(Path(file).with_suffix("").parts).removesuffix(".__init__") for file in files]


@pytest.mark.parametrize("what", LOADERS)
def test_torch_stays_unloaded(what: str) -> None:
    assert loaded_after(LOADERS[what]()).isdisjoint({"torch", "transformers"})


def test_the_command_line_loads_no_server_for_its_help() -> None:
    assert loaded_after("import gateway.cli").isdisjoint({"aiohttp", "uvicorn", "starlette", "pydantic", "httpx"})
