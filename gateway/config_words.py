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
    "MAKE",  # set by `make up`, so that messages tell how options are given there
    "NATIVE",  # the workers' kernels
    "WORKERS_ON_MACHINE",  # how many workers share a machine
)  # of the project, beside the gateway's settings
_TESTS: Final = "TEST_"
_NEAR: Final = 0.7  # a slip or two in a name; at 0.6, `timeout` is near `poll_timeout_s`


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


def near(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` may well be misspelt for. A prefix that all have in common should be left out:
    it makes everything look alike."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=_NEAR)), None)


def unknown_key(file: object, key: object, settings: Iterable[str]) -> str:
    """A sentence for a key of the settings' file that is no setting."""
    guess = near(str(key).lower().replace("-", "_"), settings)
    hint = f"did you mean {guess!r}?" if guess else f"known ones are {', '.join(sorted(settings))}."
    return f"the settings file {file} has an unknown setting {key!r}; {hint}"


def unknown_variables(environment: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """A sentence for each variable that looks like ours and that nothing reads."""
    known = {f"{PREFIX}{name.upper()}" for name in (*settings, *OTHER_VARIABLES)}
    found = []
    for name in sorted(environment):
        if name.upper() in known or not name.upper().startswith(PREFIX) or name.startswith(PREFIX + _TESTS):
            continue
        guess = near(name.upper().removeprefix(PREFIX), (each.removeprefix(PREFIX) for each in known))
        hint = f"; did you mean {PREFIX}{guess}?" if guess else ""
        found.append(f"nothing reads the variable {name}{hint}")
    return found
