"""What Redis' absence looks like to whoever asked it something. Apart from link.py, which imports Redis' client."""

from __future__ import annotations


class LinkDown(Exception):
    """Redis did not answer, or the breaker is open. The message says why."""
