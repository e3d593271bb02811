"""The tree's own rules: files that fit a head, and documents that name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PACKAGES = ("policies", "gateway", "engine_worker", "loadtest")
MAX_LINES = 350
MAX_TEST_LINES = 450  # lists of cases are long and easy to read
SUFFIXES = "py|md|yml|yaml|json|toml|txt"


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_too_long_to_read_in_one_go() -> None:
    limits = {**dict.fromkeys(sources(*PACKAGES), MAX_LINES), **dict.fromkeys(sources("tests"), MAX_TEST_LINES)}
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in limits}
    assert {str(path): length for path, length in lengths.items() if length > limits[path]} == {}


def test_every_module_opens_with_its_theory() -> None:
    silent = []
    for path in sources(*PACKAGES):
        if path.read_text("utf-8").strip():
            with tokenize.open(path) as file:
                if not file.read().lstrip().startswith('"""'):
                    silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_nothing_unsafe_is_deserialised() -> None:
    """No pickle (torch.load is one), no yaml.load."""
    pattern = re.compile(
        r"\b(pickle|cPickle|dill|cloudpickle)\.loads?\(|^\s*import pickle|torch\.load\(|yaml\.load\(", re.M
    )
    assert [str(path) for path in sources(*PACKAGES) if pattern.search(path.read_text("utf-8"))] == []


def paths_named_in(text: str) -> set[str]:
    """Paths in back-quotes: `gateway/proxy.py`, `tests/e2e/`, or a file with a suffix of ours."""
    named = set()
    for quoted in re.findall(r"`([^`\n]+)`", text):
        word = quoted.strip()
        if re.fullmatch(r"[\w./-]+", word) and (word.endswith("/") or re.fullmatch(rf".*\.({SUFFIXES})", word)):
            named.add(word)
    return named


def modules_named_in(text: str) -> set[str]:
    return set(re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", text))


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md"])
def test_documents_name_what_exists(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    missing = [path for path in paths_named_in(text) if not (ROOT / path).exists()]
    assert missing == []
    for name in modules_named_in(text):
        path = ROOT.joinpath(*name.split("."))
        parent = path.parent.with_suffix(".py")
        assert path.is_dir() or path.with_suffix(".py").is_file() or parent.is_file(), f"{document} names {name}"


def test_the_architecture_page_names_every_room() -> None:
    """Packages and their sub-packages; what those are divided into is their own affair."""
    named = {path.rstrip("/") for path in paths_named_in((ROOT / "docs/architecture.md").read_text("utf-8"))}
    folders = {path.parent.relative_to(ROOT) for path in sources(*PACKAGES) if path.name != "__init__.py"}
    rooms = {"/".join(folder.parts[:2]) for folder in folders}
    assert {room for room in rooms if not any(name.startswith(room) for name in named)} == set()


def commands_in(text: str) -> list[str]:
    """Lines of fenced shell blocks, continuation lines joined."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def test_readme_commands_exist() -> None:
    commands = commands_in((ROOT / "README.md").read_text("utf-8"))
    assert commands
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands:
        words = command.split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        match words:
            case ["make", target, *_]:
                assert target in targets, command
            case ["warmgate" | ".venv/bin/warmgate", name, *rest]:
                assert_warmgate(name, rest, command)
            case ["python" | ".venv/bin/python", "-m", module, *_]:
                assert ROOT.joinpath(*module.split(".")).with_suffix(".py").exists(), command
            case ["curl" | "docker" | "pip" | "git" | "cd", *_]:
                pass
            case _:
                pytest.fail(f"README shows a command that no rule here checks: {command}")


def assert_warmgate(name: str, rest: list[str], command: str) -> None:
    import typer.main

    from gateway.cli import app
    from gateway.config import GatewaySettings

    group = typer.main.get_command(app)
    known = group.commands.get(name)  # type: ignore[attr-defined]
    assert known is not None, command
    flags = {option for parameter in known.params for option in parameter.opts}
    if name == "serve":
        flags |= {"--" + field.replace("_", "-") for field in GatewaySettings.model_fields}
    if name == "replay":
        from loadtest.sim.cli import parser

        flags |= set(parser()._option_string_actions)
    if name in ("worker", "up"):
        flags |= worker_flags()
    assert [word for word in rest if word.startswith("--") and word.partition("=")[0] not in flags] == [], command


def worker_flags() -> set[str]:
    done = subprocess.run([sys.executable, "-m", "engine_worker", "--help"], capture_output=True, text=True, cwd=ROOT)
    return set(re.findall(r"--[\w-]+", done.stdout))
