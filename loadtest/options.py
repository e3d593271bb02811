"""Numbers on the command line: a wrong one is refused at once, in one sentence that names its option."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong without the usage of all other options above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def count(text: str) -> int:
    """1 or more."""
    if (number := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def whole(text: str) -> int:
    """0 or more."""
    if (number := _whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def above_zero(text: str) -> float:
    """Seconds, or whatever else must take some: more than 0, and not without end."""
    if not 0.0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return number


def from_zero(text: str) -> float:
    """0 or more; `inf` is a number, too."""
    if not (number := _number(text)) >= 0.0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def share(text: str) -> float:
    """From 0 to 1."""
    if not 0.0 <= (number := _number(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
