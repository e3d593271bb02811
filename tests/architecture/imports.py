"""Reads the imports of a source file without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT

OURS = ("policies", "gateway", "engine_worker", "loadtest", "tests")


@dataclass(frozen=True, slots=True)
class Import:
    """`module` as dotted name; for `from a import b` both a and a.b, since b may be a module."""

    module: str
    file: Path
    line: int

    def within(self, *packages: str) -> bool:
        return any(self.module == package or self.module.startswith(package + ".") for package in packages)

    @property
    def is_stdlib(self) -> bool:
        return self.module.partition(".")[0] in sys.stdlib_module_names

    @property
    def is_ours(self) -> bool:
        return self.module.partition(".")[0] in OURS

    def __str__(self) -> str:
        return (
            f"{self.file.relative_to(ROOT) if self.file.is_absolute() else self.file}:{self.line} imports {self.module}"
        )


def imports_of(source: str, file: Path, package: str) -> Iterator[Import]:
    """Every import in `source`, at any depth (inside functions and TYPE_CHECKING too)."""
    for node in ast.walk(ast.parse(source, str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, file, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(node, package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}" if _is_module(base, alias.name) else base, file, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (Import(str(arg.value), file, node.lineno) for arg in node.args if isinstance(arg, ast.Constant))


def imports_under(folder: str) -> list[Import]:
    found: list[Import] = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        package = ".".join(file.relative_to(ROOT).parent.parts)
        found += imports_of(file.read_text("utf-8"), file, package)
    return found


def _resolve(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_module(base: str, name: str) -> bool:
    path = ROOT.joinpath(*base.split("."))
    return (path / name).is_dir() or (path / f"{name}.py").is_file()
