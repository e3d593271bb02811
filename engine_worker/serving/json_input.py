"""JSON from a client, read strictly: what two parsers could read differently is refused.

The gateway reads the same bytes before the worker does. A duplicate key, NaN, a lone surrogate or an integer of a
thousand digits means one thing to one parser and another to the next, so each is an error here (and never a crash:
nesting is bounded before anything recurses over it).
"""

from __future__ import annotations

import json
import math
from typing import Any

from engine_worker.contract.errors import ApiError

MAX_DEPTH = 64
MAX_INT_DIGITS = 40


class _BadInput(ValueError):
    pass


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError 400 with a sentence that says what is wrong with it."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"it is not valid UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except _BadInput as error:
        raise _refused(str(error)) from error
    except RecursionError as error:
        raise _refused(f"it is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise _refused(str(error)) from error
    if not isinstance(value, dict):
        raise _refused("it must be an object")
    _check(value, look_at_strings="\\u" in text)
    return value


def _refused(reason: str) -> ApiError:
    return ApiError(400, f"The request body can't be read as JSON: {reason}.")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadInput(f"the key {_quoted(key)} appears twice in one object")
            seen.add(key)
    return result


def _constant(name: str) -> Any:
    raise _BadInput(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _BadInput("a number is too large")
    return value


def _int(digits: str) -> int:
    if len(digits) > MAX_INT_DIGITS:
        raise _BadInput("an integer has too many digits")
    return int(digits)


def _check(root: dict[str, Any], look_at_strings: bool) -> None:
    """Depth of the whole tree, and lone surrogates (which only a \\u escape can bring in). Without recursion."""
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            if look_at_strings:
                _check_strings(item)
            below += [child for child in children if isinstance(child, dict | list)]
        if not below:
            return
        level = below
    raise _refused(f"it is nested more than {MAX_DEPTH} deep")


def _check_strings(item: Any) -> None:
    strings = [*item.keys(), *item.values()] if isinstance(item, dict) else item
    for value in strings:
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise _refused("a string holds half of a surrogate pair") from error


def _quoted(key: str) -> str:
    return json.dumps(key[:40])
