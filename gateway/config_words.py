"""What is wrong with settings, in words: pydantic's errors as one sentence, and variables that nobody reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import ValidationError

PREFIX: Final = "WARMGATE_"
OTHER_VARIABLES: Final = (
    "ADDRESS",  # docker-compose.yml
    "CACHE_DIR",  # the workers' converted models and compiled kernels
    "COMPILED",  # compiled.py
    "CONFIG",  # the settings' file
    "FUZZ",  # how long `make test` looks for what breaks parsers
    "NATIVE",  # the workers' kernels
    "WORKERS_ON_MACHINE",  # how many workers share a machine
)  # of the project, beside the gateway's settings
_TESTS: Final = "TEST_"


def sentence(error: ValidationError, replica_options: Iterable[str]) -> str:
    """The first fault, with the setting's name and what would be right."""
    first = error.errors(include_url=False, include_input=False)[0]
    where, context = ".".join(str(part) for part in first["loc"]), first.get("ctx", {})
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if not where:
        return f"{message[:1].lower()}{message[1:]}."  # of several settings, which it names
    if first["type"] == "extra_forbidden":
        owner, _, name = where.rpartition(".")
        return (
            f"the setting {owner} has an unknown option {name!r}; known ones are {', '.join(sorted(replica_options))}."
        )
    if first["type"] == "too_short":
        message = f"it has {context['actual_length']} characters and needs {context['min_length']} at least"
    return f"the setting {where} is wrong: {message[:1].lower()}{message[1:]}."


def unknown_variables(environment: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """A sentence for each variable that looks like ours and that nothing reads."""
    known = {f"{PREFIX}{name.upper()}" for name in (*settings, *OTHER_VARIABLES)}
    found = []
    for name in sorted(environment):
        if name.upper() in known or not name.upper().startswith(PREFIX) or name.startswith(PREFIX + _TESTS):
            continue
        guess = difflib.get_close_matches(name.upper(), known, n=1)
        hint = f"; did you mean {guess[0]}?" if guess else ""
        found.append(f"nothing reads the variable {name}{hint}")
    return found
