"""Other names for models: what a client asks for -> what replicas serve.

A name may be a pattern with `*` (`claude-*`). A model that is served goes before any alias, an exact alias before
patterns, and patterns count in the order given. Nothing is guessed: without an alias an unknown name stays unknown.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from fnmatch import fnmatchcase


class Aliases:
    def __init__(self, names: Mapping[str, str]) -> None:
        self._exact = {name: model for name, model in names.items() if "*" not in name}
        self._patterns = [(name, model) for name, model in names.items() if "*" in name]

    def resolve(self, model: str, served: Container[str]) -> str:
        """The model that `model` stands for; itself where it is served, or nobody's alias."""
        if (not self._exact and not self._patterns) or model in served:
            return model
        if (target := self._exact.get(model)) is not None:
            return target
        return next((target for pattern, target in self._patterns if fnmatchcase(model, pattern)), model)

    def listed(self, served: Container[str]) -> list[tuple[str, str]]:
        """Names to show beside the models, with what they stand for: exact ones, of models that are served."""
        return [(name, model) for name, model in self._exact.items() if model in served and name not in served]
